"""How many workers each pool needs: pure decisions, and a simulator to try them on.

traffic_window ─▶ sizing (with queueing) ─▶ Decision. The simulator plays a trace to
simulated_workers that cost what a profile says, and returns a simulation_report.
"""

"""How many workers each pool needs: pure decisions, and a simulator to test them.

traffic_window ─▶ sizing (with queueing) ─▶ Decision. The simulator plays a trace to
simulated_workers with the costs of a profile, and returns a simulation_report.
"""

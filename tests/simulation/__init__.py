"""A whole cluster in one thread: the real state machines, a virtual clock, a seeded scheduler.

What is real: the sender's and receiver's machines with all that carries them out
(`TransferThread`, driven by hand), both roles and their schedulers, the page
pools, and the router's attempts, retries and policy. What is simulated: time,
the network, memory, and an engine whose every token depends on every cell of
every page that it should have read (`engine.py`).

A seed decides everything that happens, so a failing one can be run again:

    python -m tests.simulation.run --seed 42
"""

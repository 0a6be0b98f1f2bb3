"""A seeded mix of requests for a long time, while another process strikes the cluster's processes.

    run.py      rounds: a cluster drawn by a seed, its undisturbed answers, faults, checks, a report
    mix.py      clients of every kind, each compared with its undisturbed answer
    faults.py   the process that strikes others; it owns the Redis and Ray
    leaks.py    file descriptors, threads, memory, shared memory and temporary files

`make soak` runs it for an hour: make soak SECONDS=600 SEED=7.
"""

"""How a worker uses the cores it runs on."""

from __future__ import annotations

import os

import engine  # noqa: F401 its settings of torch's memory must be there before torch
from core.config import Config
from core.types import Role


def claim_threads(config: Config, role: Role) -> int:
    """Decides how many threads compute, and tells the libraries that will.

    Call it before torch is imported: what torch multiplies with reads this
    once, at its start, and Ray would have it say 1.
    """
    threads = config.pool(role).threads or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads


def stand_back(niceness: int) -> None:
    """Lowers the priority of the calling thread, and of those it starts from now on."""
    os.setpriority(os.PRIO_PROCESS, 0, niceness)

"""How a worker uses the cores it runs on."""

from __future__ import annotations

import os

import baton.engine  # noqa: F401 its settings of torch's memory must be there before torch
from baton.core.config import Config
from baton.core.types import Role


def claim_threads(config: Config, role: Role, ranks: int | None = None) -> int:
    """Decides how many threads compute in this process, and tells the libraries that will.

    Call it before torch is imported, as `use_threads`. A worker's `ranks` share its threads; one
    that has changed its role has as many as before, which may not be those of the role.
    """
    section = config.pool(role)
    whole = section.threads or len(os.sched_getaffinity(0))
    threads = max(1, whole // (ranks or section.tensor_parallel))
    use_threads(threads)
    return threads


def use_threads(threads: int) -> None:
    """What torch multiplies with reads this once, at its start, and Ray would have it say 1."""
    os.environ["OMP_NUM_THREADS"] = str(threads)


def stand_back(niceness: int) -> None:
    """Lowers the priority of the calling thread, and of those it starts from now on."""
    os.setpriority(os.PRIO_PROCESS, 0, niceness)

"""A worker with faults that no signal makes, each while its file lies in the folder `faults` beside
the configuration. It finds its role by its name.

    damage   pages arrive with another digest than they were sent with
    hold     decode computes only steps of two rows, and few of those
    leak     one lease is not returned; removes its file
    stop     the sender stops itself when it may write, before it has; removes its file
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

from baton.core.types import Role
from baton.decode_worker.decode_scheduler import DecodeScheduler
from baton.engine.page_pool import Lease
from baton.engine.step import Plan
from baton.kv_transfer import pool_layout
from baton.kv_transfer.sender import Sender, SenderAction
from baton.worker.standalone import main

HELD_STEPS = 20


def _take(flag: Path) -> bool:
    """Whether the file was there; it no longer is."""
    try:
        flag.unlink()
    except FileNotFoundError:
        return False
    return True


def fail_decode(folder: Path) -> None:
    digest, release = pool_layout.page_digest, Lease.release
    decide, steps = DecodeScheduler.next, itertools.count()

    def held(self: DecodeScheduler) -> Plan:
        plan = decide(self)
        if not (folder / "hold").exists():
            return plan
        return plan if len(plan) == 2 and next(steps) < HELD_STEPS else {}

    def damaged(page: Any) -> int:
        return digest(page) ^ (folder / "damage").exists()

    def leaking(self: Lease) -> None:
        # Of pages of its own: the others stay in the cache without it.
        if len(self.pages) > self.found and _take(folder / "leak"):
            self.released = True
        else:
            release(self)

    pool_layout.page_digest = damaged  # type: ignore[attr-defined]
    Lease.release = leaking  # type: ignore[method-assign]
    DecodeScheduler.next = held  # type: ignore[method-assign]


def fail_prefill(folder: Path) -> None:
    renewed = Sender.renewed

    def stopping(self: Sender, number: int, now: float) -> list[SenderAction]:
        if _take(folder / "stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return renewed(self, number, now)

    Sender.renewed = stopping  # type: ignore[method-assign]


if __name__ == "__main__":
    faults = Path(sys.argv[sys.argv.index("--config") + 1]).parent / "faults"
    faults.mkdir(exist_ok=True)
    role = Role(sys.argv[sys.argv.index("--name") + 1].partition("-")[0])
    (fail_decode if role is Role.DECODE else fail_prefill)(faults)
    main(role)

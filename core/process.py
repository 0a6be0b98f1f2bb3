"""Start times, logging, stopping, tasks and garbage collection, shared by all processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# New objects before a collection, and young collections before an older generation's. Most of
# a request's garbage has no cycles and is freed without a collection.
GARBAGE_THRESHOLDS = (20_000, 20, 20)


class StartTimes:
    """Measures the stages of a start."""

    def __init__(self, began: float | None = None) -> None:
        """`began` in time.monotonic's seconds; now by default."""
        self._last = time.monotonic() if began is None else began
        self._stages: defaultdict[str, float] = defaultdict(float)

    def mark(self, stage: str) -> None:
        """Counts the time since the previous mark as `stage`."""
        now = time.monotonic()
        self._stages[stage] += now - self._last
        self._last = now

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._stages.items())
        return f"{sum(self._stages.values()):.1f} s: {stages}"


def process_began() -> float:
    """When the kernel started this process, in time.monotonic's seconds."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


@dataclass(frozen=True, slots=True)
class StopSignal:
    """A request to stop: `requested` lets running work finish, `immediate` does not."""

    requested: asyncio.Event = field(default_factory=asyncio.Event)
    immediate: asyncio.Event = field(default_factory=asyncio.Event)

    def request(self) -> None:
        """The second request is for an immediate stop."""
        if self.requested.is_set():
            self.immediate.set()
        self.requested.set()

    async def wait_at_most(self, seconds: float, done: asyncio.Event) -> None:
        """Returns when `done` or `immediate` is set, or after `seconds`."""
        waiting = [asyncio.ensure_future(event.wait()) for event in (done, self.immediate)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()


def stop_on_signals() -> StopSignal:
    """Makes a StopSignal that SIGTERM and SIGINT request."""
    stopping = StopSignal()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.request)
    return stopping


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks and waits until they have ended, however they end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def set_up_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Pauses garbage collection. Imports, for example, make no garbage, and looking for it takes an
    eighth of torch's import time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def settle_memory() -> None:
    """Excludes all present objects from garbage collections and makes these rarer.

    For a process that has started and now serves: a full collection would stop all requests for
    tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)

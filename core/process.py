"""Start times, limits, logging, stopping, tasks and garbage collection, shared by all processes."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import resource
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# New objects before a collection, and young collections before an older generation's. Most of
# a request's garbage has no cycles and is freed without a collection.
GARBAGE_THRESHOLDS = (20_000, 20, 20)

OPEN_FILES = 65_536
"""The most open files to ask for, as Ray does: it is enough, and some code walks all numbers."""

END_SECONDS = 30.0
"""After draining: longer than all waits of an orderly end."""


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


async def start_unless_stopped(start: Coroutine[Any, Any, None], stopping: StopSignal) -> None:
    """Runs a server's start. Ends the process if it is to stop meanwhile: it has no requests yet,
    and the start may take minutes, or hang."""
    starting = asyncio.ensure_future(start)
    asked = asyncio.ensure_future(stopping.requested.wait())
    await asyncio.wait((starting, asked), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not starting.done():
        await cancel_all(starting)
        os._exit(0)  # an orderly end would wait for the start's threads
    starting.result()


def limit_end(drain_seconds: float) -> None:
    """Ends this process END_SECONDS after `drain_seconds`, should a thread hang in a library."""
    end_after(drain_seconds + END_SECONDS)


def end_after(seconds: float) -> None:
    """Ends this process then, with the stacks of its threads on stderr, also while a thread holds
    Python's lock."""
    faulthandler.dump_traceback_later(min(seconds, threading.TIMEOUT_MAX), exit=True)


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks and waits until they have ended, however they end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def raise_open_files() -> int:
    """Raises the limit of open files, which include connections, as far as the system permits.
    Returns it. Services and shells commonly begin with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft


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

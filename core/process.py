"""Logging, stopping and garbage collection, alike in every process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from dataclasses import dataclass, field

# New objects before a collection, and young collections before an older generation's. Most of
# a request's garbage has no cycles and is freed without a collection.
GARBAGE_THRESHOLDS = (20_000, 20, 20)


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
    """Requested by SIGTERM or SIGINT."""
    stopping = StopSignal()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.request)
    return stopping


def set_up_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )


def settle_memory() -> None:
    """Excludes all present objects from garbage collections and makes these rarer.

    For a process that has started and now serves: a full collection would stop all requests for
    tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)

"""What every process of ours does alike: how it logs, and how it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from dataclasses import dataclass, field

# New objects before a collection, and young collections before an older generation's. Most of
# what a request leaves behind has no cycles, and goes by itself.
GARBAGE_THRESHOLDS = (20_000, 20, 20)


@dataclass(frozen=True, slots=True)
class Stopping:
    """The word to stop: `asked` lets what runs come to its end, `at_once` does not."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    at_once: asyncio.Event = field(default_factory=asyncio.Event)

    def ask(self) -> None:
        """Asked twice is asked to hurry."""
        if self.asked.is_set():
            self.at_once.set()
        self.asked.set()

    async def wait_at_most(self, seconds: float, done: asyncio.Event) -> None:
        """Returns when `done`, after so many seconds, or when there is no time for either."""
        waiting = [asyncio.ensure_future(event.wait()) for event in (done, self.at_once)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()


def stop_on_signals() -> Stopping:
    """Asked by SIGTERM or SIGINT."""
    stopping = Stopping()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.ask)
    return stopping


def set_up_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )


def settle_memory() -> None:
    """For a process that has started and now serves: what it has by now it keeps, and garbage
    collections look for cycles only in what came later, and less often. Looking through
    everything would stop all requests for tens of milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)

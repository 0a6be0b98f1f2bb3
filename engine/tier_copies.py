"""Copies of pages between the pool and the second tier: their threads, and what they cost.

A save copies a batch of pages. The life of a restoration:

    under way ─▶ ended: the first `done` pages are restored
        └─ cancel ─▶ as ended, and no further page is written

The pool's thread makes a restoration, may cancel it and settles it; the copying thread calls
`run`. Pages are restored in order, up to the first that cannot be restored.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.engine.page_files import PageFiles, Task
from baton.engine.page_memory import PageMemory
from baton.engine.page_pool import Lease

KEEP = 0.9
"""Weight of earlier measurements when a new one comes."""
FADE = 0.99
"""The cost of a tier found too slow decays by this each time, so that it is tried again."""


class Tier(enum.StrEnum):
    """Where a page outside the pool is. The values are metric labels."""

    HOST = "host"
    FILES = "files"


@dataclass(slots=True)
class TierCounts:
    """Pages of one tier, counted from the start."""

    hits: int = 0  # found for a prompt
    restored: int = 0
    stored: int = 0
    evicted: int = 0  # to make room for others
    dropped: int = 0  # left the tier above before they could be stored
    damaged: int = 0


class Background(Protocol):
    """Runs tasks beside the engine thread, one after the other."""

    def submit(self, task: Task) -> None: ...

    def stop(self, seconds: float) -> None:
        """Waits at most `seconds` for the submitted tasks."""


class BackgroundThread:
    """A thread that does not keep its process alive. An exception in a task ends it."""

    def __init__(self, name: str, on_crash: Callable[[BaseException], None]) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._on_crash = on_crash
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        self._tasks.put(task)

    def stop(self, seconds: float) -> None:
        self._tasks.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while task := self._tasks.get():
                task()
        except BaseException as error:  # noqa: BLE001 the thread's edge: its owner must know
            self._on_crash(error)


MakeBackground = Callable[[str, Callable[[BaseException], None]], Background]


@dataclass(frozen=True, slots=True, eq=False)
class Save:
    """A batch of pages on their way to rows of host memory."""

    keys: Sequence[bytes]
    lease: Lease
    rows: Lease


@dataclass(eq=False)
class Restoration:
    keys: Sequence[bytes]  # of the lease's pages; the last len(rows) are restored
    lease: Lease
    rows: Sequence[int | None]  # the row of each page to restore; None: it is in a file
    next_key: bytes  # of the first page that is not in the pool
    held: list[Lease] = field(default_factory=list)  # of the rows and files
    moved: float = field(default_factory=time.monotonic)  # start, or time of the last page
    done: int = 0
    damaged: bool = False  # the page after the `done` ones could not be read
    seconds: dict[Tier, float] = field(default_factory=lambda: dict.fromkeys(Tier, 0.0))
    _cancelled: bool = False
    _writing: threading.Lock = field(default_factory=threading.Lock)  # held for each page

    @property
    def found(self) -> int:
        """Pages of the lease that were in the pool."""
        return len(self.keys) - len(self.rows)

    @property
    def missing(self) -> Sequence[bytes]:
        """Keys of the pages to restore."""
        return self.keys[self.found :]

    @property
    def coming(self) -> set[bytes]:
        """The keys for which prompts with the same continuation wait."""
        return {self.next_key, *self.missing}

    @property
    def tiers(self) -> list[Tier]:
        return [Tier.FILES if row is None else Tier.HOST for row in self.rows]

    def cancel(self) -> None:
        """Stops it: after this returns, no page of the lease is written."""
        with self._writing:
            self._cancelled = True

    def run(self, memory: PageMemory, files: PageFiles | None) -> None:
        pages = self.lease.pages[self.found :]
        for key, row, page, tier in zip(self.missing, self.rows, pages, self.tiers, strict=True):
            began = time.monotonic()
            if row is None and (files is None or not files.read(key, memory.row(memory.staging))):
                self.damaged = True
                return
            with self._writing:
                if self._cancelled:
                    return
                memory.copy([(page, memory.staging if row is None else row)], restore=True)
                self.done += 1
            self.moved = time.monotonic()
            self.seconds[tier] += self.moved - began


class UnitCost:
    """Seconds per unit; recent measurements count the most."""

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0

    @property
    def known(self) -> bool:
        return self._units > 0

    @property
    def each(self) -> float:
        """0 before the first measurement."""
        return self._seconds / self._units if self._units else 0.0

    def add(self, units: int, seconds: float) -> None:
        if units:
            self._units = KEEP * self._units + units
            self._seconds = KEEP * self._seconds + seconds

    def fade(self) -> None:
        self._seconds *= FADE


class RestoreCosts:
    """Compares measured costs: copying a page from each tier, and computing a prompt token.

    Until a cost has been measured, pages are restored.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.compute = UnitCost()  # tokens
        self.copies = {tier: UnitCost() for tier in Tier}  # pages

    def pays(self, tiers: list[Tier], queued: list[Tier], places: int) -> bool:
        """True if pages of these tiers, after those queued, arrive sooner than `places` pages of
        tokens are computed."""
        if not self.compute.known:
            return True
        copy = sum(self.copies[tier].each for tier in (*queued, *tiers))
        if copy <= places * self._page_size * self.compute.each:
            return True
        for tier in set(tiers):
            self.copies[tier].fade()
        return False

"""Pages on their way from the second tier into leased pages of the pool.

    under way ─▶ ended: the first `done` pages are there
        └─ cancel ─▶ as ended, and no other page is written any more

The pool's thread makes it, may cancel it and settles it; `run` is for the thread
that copies. Pages are brought back in order, up to the first that cannot be.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.engine.file_tier import PageBytes
from baton.engine.host_tier import PageMemory
from baton.engine.page_pool import Lease

ReadFile = Callable[[bytes, PageBytes], bool]
"""Fills the second with the page of the first, if there is a sound file."""


@dataclass(eq=False)
class Restoration:
    # Of the lease's pages, from the first; those of `rows` are brought back.
    keys: Sequence[bytes]
    lease: Lease
    # Where each page to be brought back is; None where it is in a file.
    rows: Sequence[int | None]
    moved: float = field(default_factory=time.monotonic)  # when it began, or the last page came
    done: int = 0
    damaged: bool = False  # the page after those could not be read
    seconds: dict[Tier, float] = field(default_factory=lambda: dict.fromkeys(Tier, 0.0))
    _cancelled: bool = False
    # Held while a page of the lease is written.
    _writing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def found(self) -> int:
        """Pages of the lease that were in the pool."""
        return len(self.keys) - len(self.rows)

    @property
    def missing(self) -> Sequence[bytes]:
        """The keys of the pages to be brought back."""
        return self.keys[self.found :]

    @property
    def tiers(self) -> list[Tier]:
        return [Tier.FILES if row is None else Tier.HOST for row in self.rows]

    def cancel(self) -> None:
        """When this returns, no page of the lease is written any more."""
        with self._writing:
            self._cancelled = True

    def run(self, memory: PageMemory, read_file: ReadFile) -> None:
        pages = self.lease.pages[self.found :]
        for key, row, page, tier in zip(self.missing, self.rows, pages, self.tiers, strict=True):
            began = time.monotonic()
            if row is None and not read_file(key, memory.row(memory.staging)):
                self.damaged = True
                return
            with self._writing:
                if self._cancelled:
                    return
                memory.restore(memory.staging if row is None else row, page)
                self.done += 1
            self.moved = time.monotonic()
            self.seconds[tier] += self.moved - began


KEEP = 0.9
"""What a measurement counts for, once another has come."""
FADE = 0.99
"""A tier that is found too slow is believed a little faster each time: it is tried again."""


class Tier(enum.StrEnum):
    """Where a page is that is not in the pool. The values are labels of metrics."""

    HOST = "host"
    FILES = "files"


class Pace:
    """Seconds a unit."""

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

    def note(self, units: int, seconds: float) -> None:
        if units:
            self._units = KEEP * self._units + units
            self._seconds = KEEP * self._seconds + seconds

    def fade(self) -> None:
        self._seconds *= FADE


class RestoreCosts:
    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.compute = Pace()  # tokens
        self.copies = {tier: Pace() for tier in Tier}  # pages

    def pays(self, tiers: list[Tier], queued: list[Tier]) -> bool:
        """Whether pages of these tiers, behind those queued, come sooner than by compute."""
        if not self.compute.known:
            return True
        copy = sum(self.copies[tier].each for tier in (*queued, *tiers))
        if copy <= len(tiers) * self._page_size * self.compute.each:
            return True
        for tier in set(tiers):
            self.copies[tier].fade()
        return False

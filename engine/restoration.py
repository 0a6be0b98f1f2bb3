"""Pages on their way from the second tier into leased pages of the pool.

    under way ─▶ ended: the first `done` pages are there
        └─ cancel ─▶ as ended, and no other page is written any more

The pool's thread makes it, may cancel it and settles it; `run` is for the thread
that copies. Pages are brought back in order, up to the first that cannot be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.engine.page_file import PageBytes
from baton.engine.page_memory import PageMemory
from baton.engine.page_pool import Lease
from baton.engine.restore_costs import Tier

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

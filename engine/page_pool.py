"""Who holds which page.

The pool hands out pages as leases. A lease has one owner and is released once;
a second release raises. A step that runs beside the host pins the leases it
uses: pages released meanwhile come back when it has ended. Pages are handed out
in runs of neighbours where there are any, so that a transfer merges them into
few descriptors.

Only the thread that owns the pool may call it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from types import TracebackType

from core.errors import Exhausted, Internal


class Lease:
    """Pages held by one owner. Grows with `extend`, ends with `release`."""

    __slots__ = ("_pins", "_pool", "pages", "released")

    def __init__(self, pool: PagePool, pages: list[int]) -> None:
        self._pool = pool
        self.pages = pages
        self.released = False
        self._pins = 0

    @property
    def pinned(self) -> bool:
        """Whether a step under way reads or writes the pages."""
        return self._pins > 0

    def pin(self) -> None:
        self._pins += 1

    def unpin(self) -> None:
        self._pins -= 1
        if self.released and not self.pinned:
            self._pool._give_back(self)

    def extend(self, count: int) -> None:
        """Adds `count` pages at the end, or raises Exhausted and changes nothing."""
        if self.released:
            raise Internal("a released lease cannot grow")
        self.pages.extend(self._pool._take(count))

    def release(self) -> None:
        """Gives all pages back, at once or when the last pin goes."""
        if self.released:
            raise Internal("a lease was released twice")
        self.released = True
        if not self.pinned:
            self._pool._give_back(self)

    def __len__(self) -> int:
        return len(self.pages)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.released:
            self.release()


class PagePool:
    """`total` pages, numbered from 0, of `page_size` tokens each."""

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        # Free pages as maximal runs [start, end), sorted by start.
        self._runs: list[tuple[int, int]] = [(0, total)] if total else []
        self._leases: set[Lease] = set()
        self.free = total
        self._changed = True  # since the pages were last counted one by one

    @property
    def leased(self) -> int:
        return self.total - self.free

    @property
    def returning(self) -> bool:
        """Whether released pages come back when the steps under way have ended."""
        return any(lease.released for lease in self._leases)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def acquire(self, count: int) -> Lease:
        """A lease of `count` pages, or Exhausted."""
        lease = Lease(self, self._take(count))
        self._leases.add(lease)
        return lease

    def check_integrity(self, held: int | None = None) -> str:
        """Empty when every page is free or held by exactly one lease; else what is wrong.

        `held` is how many pages the owner knows of; more are a leak.
        """
        if held is not None and held != self.leased:
            return f"{self.leased} pages are leased, but the owner knows of {held}"
        if not self._changed:
            return ""
        problem = self._count_pages()
        self._changed = bool(problem)
        return problem

    def _count_pages(self) -> str:
        seen = [0] * self.total
        for page in self._free_pages():
            seen[page] += 1
        for lease in self._leases:
            for page in lease.pages:
                seen[page] += 1
        wrong = [page for page, count in enumerate(seen) if count != 1]
        if wrong:
            return f"{len(wrong)} of {self.total} pages are lost or held twice, first {wrong[0]}"
        if self.free != sum(end - start for start, end in self._runs):
            return "the count of free pages does not match the free list"
        return ""

    def _free_pages(self) -> Iterable[int]:
        for start, end in self._runs:
            yield from range(start, end)

    def _take(self, count: int) -> list[int]:
        if count > self.free:
            raise Exhausted(f"{count} pages wanted, {self.free} of {self.total} free")
        pages: list[int] = []
        while len(pages) < count:
            pages.extend(self._take_run(count - len(pages)))
        self.free -= count
        self._changed = True
        return pages

    def _take_run(self, wanted: int) -> range:
        """The first run that holds `wanted` pages, or else the longest one."""
        index = next(
            (i for i, (start, end) in enumerate(self._runs) if end - start >= wanted), None
        )
        if index is None:
            index = max(range(len(self._runs)), key=lambda i: self._runs[i][1] - self._runs[i][0])
        start, end = self._runs[index]
        cut = min(end, start + wanted)
        self._runs[index : index + 1] = [(cut, end)] if cut < end else []
        return range(start, cut)

    def _give_back(self, lease: Lease) -> None:
        self._leases.remove(lease)
        self._changed = True
        self.free += len(lease.pages)
        for start, end in merge_runs(sorted(lease.pages)):
            self._insert_run(start, end)

    def _insert_run(self, start: int, end: int) -> None:
        index = bisect.bisect_left(self._runs, (start, end))
        if index < len(self._runs) and self._runs[index][0] == end:
            end = self._runs.pop(index)[1]
        if index > 0 and self._runs[index - 1][1] == start:
            start = self._runs[index - 1][0]
            index -= 1
            self._runs.pop(index)
        self._runs.insert(index, (start, end))


def merge_runs(pages: Iterable[int]) -> list[tuple[int, int]]:
    """`pages` in their given order, as runs [start, end) of consecutive ids."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and runs[-1][1] == page:
            runs[-1] = (runs[-1][0], page + 1)
        else:
            runs.append((page, page + 1))
    return runs

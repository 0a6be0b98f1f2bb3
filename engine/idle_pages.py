"""Known pages without a lease, in the order of eviction: what was used longest ago goes first.

A retained page counts as used until its time is over. Retention changes the order and holds
nothing: where no other page is left, retained ones are evicted, first those whose time ends first.
At most `most_retained` pages are, so that those of hints do not crowd out all others.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator

LEAST_OUTDATED = 64
"""Outdated entries of the heap that are not worth building it anew."""


class IdlePages:
    def __init__(self, most_retained: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_retained = most_retained
        self.clock = clock
        self._used: OrderedDict[int, None] = OrderedDict()  # the longest idle first
        # The end of a page's time, and a number that orders pages of one end. An entry of the heap
        # that differs from the page's here is outdated.
        self._retained: dict[int, tuple[float, int]] = {}
        self._ends: list[tuple[float, int, int]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._used) + len(self._retained)

    def __contains__(self, page: object) -> bool:
        return page in self._used or page in self._retained

    def __iter__(self) -> Iterator[int]:
        """In no particular order."""
        return itertools.chain(self._used, self._retained)

    def add(self, page: int, until: float) -> None:
        """Adds a page that was used just now, unless it is there."""
        if not until and not self._retained:  # without hints this is all
            self._used.setdefault(page, None)
        elif page not in self:
            self._place(page, until)

    def touch(self, page: int, until: float) -> None:
        """Counts as use of a page, if it is there."""
        if page in self:
            self.discard(page)
            self._place(page, until)

    def discard(self, page: int) -> None:
        self._used.pop(page, None)
        if self._retained:
            self._retained.pop(page, None)

    def pop(self, count: int, without: Container[int] = ()) -> list[int]:
        """Removes the first `count` in the order of eviction."""
        self._expire()
        pages = list(itertools.islice((p for p in self._used if p not in without), count))
        for page in pages:
            del self._used[page]
        if len(pages) < count:
            pages += self._pop_retained(count - len(pages), without)
        return pages

    def _place(self, page: int, until: float) -> None:
        self._expire()
        if not until or until <= self.clock():
            self._used[page] = None
            return
        self._retained[page] = (until, next(self._numbers))
        heapq.heappush(self._ends, (*self._retained[page], page))
        while len(self._retained) > self._most_retained:
            self._used[self._pop_first()] = None
        if len(self._ends) > 2 * len(self._retained) + LEAST_OUTDATED:
            self._ends = [(*entry, page) for page, entry in self._retained.items()]
            heapq.heapify(self._ends)

    def _expire(self) -> None:
        """Counts retained pages whose time is over as used at its end."""
        now = self.clock() if self._retained else 0.0
        while self._retained and self._first_end() <= now:
            self._used[self._pop_first()] = None

    def _first_end(self) -> float:
        """Drops outdated entries of the heap."""
        while self._retained.get(self._ends[0][2]) != self._ends[0][:2]:
            heapq.heappop(self._ends)
        return self._ends[0][0]

    def _pop_first(self) -> int:
        self._first_end()
        page = heapq.heappop(self._ends)[2]
        del self._retained[page]
        return page

    def _pop_retained(self, count: int, without: Container[int]) -> list[int]:
        pages: list[int] = []
        kept: dict[int, tuple[float, int]] = {}
        while len(pages) < count and self._retained:
            self._first_end()
            until, number, page = heapq.heappop(self._ends)
            del self._retained[page]
            if page in without:
                kept[page] = (until, number)
            else:
                pages.append(page)
        for page, entry in kept.items():
            self._retained[page] = entry
            heapq.heappush(self._ends, (*entry, page))
        return pages

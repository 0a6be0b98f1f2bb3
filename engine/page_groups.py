"""The page pool of a model whose layers have different windows.

A sequence's lease has a table of pages for each slice of the layers (core/page_reach.py). Tables
without a window hold all pages. Tables with a window hold the pages that a query after the last
full page may see: `advance` returns the others, and complete pages stay in the cache.

A hit of n pages needs all n pages of slices without a window. Of the other slices it needs the
last pages, as far as the window reaches back.

Both ends of a transfer list a prompt's pages in one order: by their place in the prompt, then by
slice, without the pages that are out of reach once the prompt is computed.

    tokens          0 ……………………………………… n
    no window       [0][1][2][3][4][5][6]
    window               gone   [4][5][6]
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Container, Sequence

from baton.core.errors import Internal
from baton.core.page_keys import slice_key
from baton.core.page_reach import Window, first_kept
from baton.engine.page_pool import Lease, PagePool

GONE = -1
"""A table's entry for a page that was returned or never allocated."""


class GroupedLease(Lease):
    """`pages` is the table of slice 0. `found` and `named` count entries of each table."""

    __slots__ = ("_grouped", "_passed", "_passed_keys", "_tables")

    def __init__(self, pool: GroupedPool, tables: list[list[int]], found: int) -> None:
        super().__init__(pool, tables[0], found)
        self._grouped = pool
        self._tables = tables
        self._passed = [table.count(GONE) for table in tables]  # gone pages at the front
        self._passed_keys: list[bytes] = []

    @property
    def tables(self) -> Sequence[list[int]]:
        return self._tables

    @property
    def entries(self) -> int:
        return sum(map(len, self._tables))

    @property
    def passed(self) -> Sequence[int]:
        """The number of pages at the front of each table that are gone."""
        return self._passed

    @property
    def held(self) -> list[int]:
        return self._listed(0, max(map(len, self._tables)), self._passed)

    @property
    def fresh(self) -> list[int]:
        return self._listed(self.found, max(map(len, self._tables)), self._passed)

    @property
    def held_before(self) -> int:
        return sum(max(0, self.found - passed) for passed in self._passed)

    def listed(self, start: int, end: int, tokens: int) -> list[int]:
        return self._listed(start, end, self._grouped.first_pages(tokens))

    def _listed(self, start: int, end: int, firsts: Sequence[int]) -> list[int]:
        """Pages `start` to `end` of all tables, without those before each table's first."""
        tables = list(zip(firsts, self._tables, strict=True))
        return [
            table[place]
            for place in range(start, end)
            for first, table in tables
            if first <= place < len(table)
        ]

    def missing(self, count: int) -> int:
        return sum(max(0, count - len(table)) for table in self._tables)

    def extend(self, count: int) -> None:
        self.cover(len(self.pages) + count)

    def cover(self, count: int) -> None:
        if self.released:
            raise Internal("a released lease cannot grow")
        self._grouped.grow(self._tables, [count] * len(self._tables))

    def advance(self, tokens: int) -> None:
        for number, first in enumerate(self._grouped.first_pages(tokens)):
            if first > self._passed[number]:
                self._pass(number, min(first, len(self._tables[number])))

    def _pass(self, number: int, first: int) -> None:
        table, gone = self._tables[number], slice(self._passed[number], first)
        pages = table[gone]
        self._passed_keys += filter(None, map(self._pool.cache.key_of, pages))
        self._pool.return_pages(self, pages)
        table[gone] = [GONE] * len(pages)
        self._passed[number] = first

    def name(self, keys: Sequence[bytes]) -> None:
        for number, (passed, table) in enumerate(zip(self._passed, self._tables, strict=True)):
            for place in range(max(self.named, passed), len(keys)):
                self._name(table[place], slice_key(keys[place], number))
        self.named = max(self.named, len(keys))

    def retain(self, keys: Sequence[bytes], seconds: float) -> None:
        numbers = range(len(self._tables))
        sliced = [slice_key(key, number) for key in keys for number in numbers]
        super().retain(sliced, seconds)

    def forget(self) -> None:
        for page in self._listed(0, self.named, self._passed):
            self._pool.forget(page)
        for key in self._passed_keys:
            with self._pool.hold([key]) as held:
                held.forget()
        self._copies = {}

    def __len__(self) -> int:
        return min(map(len, self._tables))


class GroupedPool(PagePool):
    """`windows` has one entry per slice, the widest first."""

    def __init__(self, total: int, page_size: int, windows: Sequence[Window]) -> None:
        super().__init__(total, page_size)
        self.slices = len(windows)
        self._windows = tuple(windows)
        # The most pages of each table that a sequence needs: those in reach, the page that it
        # computes and the one before it, which may not have been returned yet.
        self._most = [
            math.inf if window is None else self.pages_for(window) + 2 for window in windows
        ]

    def first_pages(self, tokens: int) -> list[int]:
        """The first page to keep of a sequence of `tokens` tokens, by slice."""
        return [first_kept(window, tokens, self.page_size) for window in self._windows]

    def longest_context(self, limit: int) -> int:
        def pages(places: int) -> int:
            return int(sum(min(places, most) for most in self._most))

        fitting = bisect.bisect_right(range(self.pages_for(limit) + 1), self.total, key=pages) - 1
        return min(limit, fitting * self.page_size)

    def find(self, keys: Sequence[bytes]) -> int:
        return self.extend_hit(keys, self.cache)

    def extend_hit(
        self, keys: Sequence[bytes], known: Container[bytes], start: int = 0, tokens: int = 0
    ) -> int:
        """`tokens`: no query is at an earlier position."""
        count = len(keys)
        for number, window in enumerate(self._windows):
            if window is None:
                places = range(start, count)
                lacking = (place for place in places if slice_key(keys[place], number) not in known)
                count = next(lacking, count)
        while (missing := self._last_missing(keys[:count], known, tokens)) is not None:
            count = missing
        return count

    def _last_missing(
        self, keys: Sequence[bytes], known: Container[bytes], tokens: int
    ) -> int | None:
        """The last page that a hit of these keys lacks in a table with a window."""
        firsts = self.first_pages(max(tokens, len(keys) * self.page_size))
        for number, window in enumerate(self._windows):
            if window is not None:
                for place in reversed(range(firsts[number], len(keys))):
                    if slice_key(keys[place], number) not in known:
                        return place
        return None

    def keys_of_hit(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        firsts = self.first_pages(len(keys) * self.page_size)
        return [
            slice_key(key, number)
            for place, key in enumerate(keys)
            for number, first in enumerate(firsts)
            if place >= first
        ]

    def cost(self, count: int, keys: Sequence[bytes] = ()) -> int:
        """Includes pages that tables with a window need as their sequence advances."""
        known = self._known(keys, self.find(keys), 0)
        tables = zip(known, self._most, strict=True)
        wanted = int(sum(min(count - table.count(GONE), most) for table, most in tables))
        return self.lease_cost(_pages(known), wanted)

    def acquire(self, count: int, keys: Sequence[bytes] = ()) -> Lease:
        """Tables with a window get their pages later, from `cover`."""
        self._require(self.cost(count, keys))
        found = self.find(keys)
        self._count_lookup(keys, found)
        ends = [count if window is None else found for window in self._windows]
        return self._lease(self._known(keys, found, 0), ends, found)

    def cost_to_receive(self, tokens: int, keys: Sequence[bytes]) -> int:
        found = self.extend_hit(keys, self.cache, tokens=tokens)
        wanted = self.pages_for(tokens) * self.slices - sum(self.first_pages(tokens))
        return self.lease_cost(_pages(self._known(keys, found, tokens)), wanted)

    def receive(self, tokens: int, keys: Sequence[bytes]) -> Lease:
        self._require(self.cost_to_receive(tokens, keys))
        found = self.extend_hit(keys, self.cache, tokens=tokens)
        self._count_lookup(keys, found)
        ends = [self.pages_for(tokens)] * self.slices
        return self._lease(self._known(keys, found, tokens), ends, found)

    def growth(self, lease: Lease, tokens: int) -> int:
        assert isinstance(lease, GroupedLease)
        tables = zip(lease.passed, lease.tables, self._most, strict=True)
        return int(
            sum(
                max(0, min(self.pages_for(tokens) - len(table), most + passed - len(table)))
                for passed, table, most in tables
            )
        )

    def _known(self, keys: Sequence[bytes], found: int, tokens: int) -> list[list[int]]:
        """The tables of a hit of `found` pages."""
        firsts = self.first_pages(max(tokens, found * self.page_size))
        return [
            [GONE] * first
            + [self.cache.page_of(slice_key(key, number)) for key in keys[first:found]]
            for number, first in enumerate(firsts)
        ]

    def _lease(self, tables: list[list[int]], ends: Sequence[int], found: int) -> GroupedLease:
        for page in _pages(tables):
            self._hold(page)
        self.grow(tables, ends)
        return self._add_lease(GroupedLease(self, tables, found))

    def grow(self, tables: list[list[int]], ends: Sequence[int]) -> None:
        """Adds pages to each table up to its end, in the order in which a transfer lists them."""
        missing = [max(0, end - len(table)) for table, end in zip(tables, ends, strict=True)]
        fresh = iter(self._allocate(sum(missing)))
        for place in range(min(map(len, tables)), max(ends)):
            for table, end in zip(tables, ends, strict=True):
                if len(table) == place < end:
                    table.append(next(fresh))


def _pages(tables: Sequence[Sequence[int]]) -> list[int]:
    return [page for table in tables for page in table if page != GONE]


def make_pool(total: int, page_size: int, windows: Sequence[Window]) -> PagePool:
    """Makes the pool of a model whose slices of layers have these windows."""
    if list(windows) == [None]:
        return PagePool(total, page_size)
    return GroupedPool(total, page_size, windows)

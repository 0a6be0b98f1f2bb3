"""The free pages of a pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class FreePages:
    """Free pages as runs of neighbours, at first one run of all `total`.

    Pages allocated together are neighbours if possible, so that a transfer merges them into few
    descriptors. Runs are in buckets by length, each twice as wide as the one before: allocation
    looks at a few buckets, however many runs there are.
    """

    def __init__(self, total: int) -> None:
        self._count = 0
        self._ends: dict[int, int] = {}  # ends of runs [start, end), by start
        self._starts: dict[int, int] = {}  # starts of runs, by end
        # The starts of runs of 2^(i-1) to 2^i - 1 pages are the keys of bucket i.
        self._buckets: list[dict[int, None]] = [{} for _ in range(total.bit_length() + 1)]
        if total:
            self._insert(0, total)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for start, end in self._ends.items():
            yield from range(start, end)

    def add(self, pages: Iterable[int]) -> None:
        for start, end in merge_runs(sorted(pages)):
            if start in self._starts:
                start = self._remove(self._starts[start])[0]
            if end in self._ends:
                end = self._remove(end)[1]
            self._insert(start, end)

    def allocate(self, count: int) -> list[int]:
        """Returns `count` pages; there must be as many."""
        pages: list[int] = []
        while len(pages) < count:
            start, end = self._remove(self._choose(count - len(pages)))
            cut = min(end, start + count - len(pages))
            pages += range(start, cut)
            if cut < end:
                self._insert(cut, end)
        return pages

    def _choose(self, wanted: int) -> int:
        """The start of a run that holds `wanted` pages; if there is none, of one of the longest."""
        fitting = (wanted - 1).bit_length() + 1
        for bucket in self._buckets[fitting:]:
            if bucket:
                return next(iter(bucket))
        return next(next(iter(bucket)) for bucket in reversed(self._buckets) if bucket)

    def _insert(self, start: int, end: int) -> None:
        self._ends[start], self._starts[end] = end, start
        self._buckets[(end - start).bit_length()][start] = None
        self._count += end - start

    def _remove(self, start: int) -> tuple[int, int]:
        end = self._ends.pop(start)
        del self._starts[end], self._buckets[(end - start).bit_length()][start]
        self._count -= end - start
        return start, end


def merge_runs(pages: Iterable[int]) -> list[tuple[int, int]]:
    """`pages` in order, as runs [start, end) of consecutive ids."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and runs[-1][1] == page:
            runs[-1] = (runs[-1][0], page + 1)
        else:
            runs.append((page, page + 1))
    return runs

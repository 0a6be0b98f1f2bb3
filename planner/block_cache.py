"""The prefix caches of one pool's simulated workers: who holds which blocks.

A worker is a bit. Each block has the set of workers that hold it as one number, so that what
all of them hold of a prompt is found in one walk along its blocks.

A worker holds as many blocks as its pool has room for and lets go of the one used the longest
ago; of a prompt, of the last block before the first. Blocks of running requests are no
exception: they have been used just now.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray


class BlockCaches:
    def __init__(self, capacity: int) -> None:
        """Of `capacity` blocks a worker."""
        self._capacity = capacity
        self._holders: dict[int, int] = {}  # by block, a bit for each worker
        self._held: dict[int, OrderedDict[int, None]] = {}  # by worker, the last used at the end

    def add_worker(self, index: int) -> None:
        self._held[index] = OrderedDict()

    def remove_worker(self, index: int) -> None:
        for block in self._held.pop(index):
            if others := self._holders[block] ^ (1 << index):
                self._holders[block] = others
            else:
                del self._holders[block]

    def hold(self, index: int, blocks: Sequence[int]) -> None:
        """A prompt of these blocks is computed or has come there."""
        held, holders, bit = self._held[index], self._holders, 1 << index
        for block in reversed(blocks):
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = None
                holders[block] = holders.get(block, 0) | bit
        for _ in range(len(held) - self._capacity):
            oldest, _ = held.popitem(last=False)
            if others := holders[oldest] ^ bit:
                holders[oldest] = others
            else:
                del holders[oldest]

    def leading(self, blocks: Sequence[int], workers: int) -> NDArray[numpy.int64]:
        """How many blocks at the front of a prompt each of the first `workers` holds."""
        everyone = left = (1 << workers) - 1
        groups: list[tuple[int, int]] = []  # how many blocks, held by whom
        depth = 0
        for depth, block in enumerate(blocks):
            holders = left & self._holders.get(block, 0)
            if holders != left:
                groups.append((depth, left ^ holders))
                left = holders
                if not left:
                    break
        if left:
            groups.append((depth + 1 if blocks else 0, left))
        return _spread(groups, everyone, workers)


def _spread(groups: list[tuple[int, int]], everyone: int, workers: int) -> NDArray[numpy.int64]:
    """One number a worker. The largest group is written at once: mostly, nearly all are in it."""
    depth, largest = max(groups, key=lambda group: group[1].bit_count())
    found = numpy.full(workers, depth, dtype=numpy.int64)
    if largest != everyone:
        for depth, members in groups:
            if members is not largest:
                _write(found, depth, members)
    return found


def _write(found: NDArray[numpy.int64], depth: int, members: int) -> None:
    while members:
        lowest = members & -members
        found[lowest.bit_length() - 1] = depth
        members ^= lowest

"""The page table on the device: one row (slot) per sequence, with its pages by slice of the
layers.

A sequence gets a slot with its first step. Its tables only grow, so a step uploads only the new
pages; entries of returned pages stay, and nothing reads them. If no slot is free, those of
released leases are reused, then the least recently used; a sequence that comes back is uploaded
again.
"""

from __future__ import annotations

import numpy as np
import torch

from baton.core.errors import Exhausted, Internal
from baton.engine.gpu.batch import Ints
from baton.engine.page_pool import Lease


class Slots:
    def __init__(self, count: int, pages: int, device: torch.device, slices: int = 1) -> None:
        """`count` slots of up to `pages` pages a slice, and a padding row without a sequence."""
        self.table = torch.zeros(count + 1, slices * pages, dtype=torch.int32, device=device)
        self.tables = [self.table[:, at * pages : (at + 1) * pages] for at in range(slices)]
        self._width = pages
        self.last_tokens = torch.zeros(count + 1, dtype=torch.int32, device=device)
        self.padding = count
        self._free = list(range(count))
        self._slots: dict[Lease, int] = {}  # most recently used last
        # By slot: how many entries the table has, in all and of each slice.
        self._known: list[int] = [0] * count
        self._known_of_slice = [[0] * slices for _ in range(count)]

    def place(self, leases: list[Lease]) -> tuple[list[int], Ints]:
        """The slot of each lease, and the table's updates: [n, 2], flat place and page.

        Raises before anything changes. The updates must reach the table.
        """
        counts = [len(lease.pages) for lease in leases]  # the first table is the longest
        if max(counts) > self._width:
            raise Internal("a sequence has more pages than its context has room for")
        if len(self.tables) > 1:
            counts = [lease.entries for lease in leases]
        self._make_room(leases)
        slots = [self._slot(lease) for lease in leases]
        fresh = [
            self._new_pages(slot, number, table)
            for slot, lease, count in zip(slots, leases, counts, strict=True)
            if count > self._known[slot]
            for number, table in enumerate(lease.tables)
        ]
        return slots, np.concatenate(fresh) if fresh else np.empty((0, 2), dtype=np.int32)

    def _make_room(self, leases: list[Lease]) -> None:
        wanted = [lease for lease in leases if lease not in self._slots]
        if len(wanted) <= len(self._free):
            return
        # Not pinned ones: a step in flight may leave a token that only the device knows.
        kept = set(leases)
        idle = [lease for lease in self._slots if not lease.pinned and lease not in kept]
        idle.sort(key=lambda lease: not lease.released)
        if len(wanted) > len(self._free) + len(idle):
            raise Exhausted(
                f"a step of {len(leases)} sequences; the device has {self.padding} slots"
            )
        for lease in idle[: len(wanted) - len(self._free)]:
            self._free.append(self._slots.pop(lease))

    def _slot(self, lease: Lease) -> int:
        """The lease's slot, now the most recently used."""
        slot = self._slots.pop(lease, None)
        if slot is None:
            slot = self._free.pop()
            self._known[slot] = 0
            self._known_of_slice[slot] = [0] * len(self.tables)
        self._slots[lease] = slot
        return slot

    def _new_pages(self, slot: int, number: int, pages: list[int]) -> Ints:
        known = self._known_of_slice[slot][number]
        self._known[slot] += len(pages) - known
        self._known_of_slice[slot][number] = len(pages)
        start = slot * self.table.shape[1] + number * self._width
        places = np.arange(known, len(pages), dtype=np.int32) + start
        # A returned page has no id: any valid one will do.
        there = np.maximum(np.asarray(pages[known:], dtype=np.int32), 0)
        return np.stack((places, there), axis=1)

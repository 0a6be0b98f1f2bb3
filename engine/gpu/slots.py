"""Rows of a page table on the device: which pages each sequence holds.

A sequence gets a slot, a row of the table, with its first step and keeps it as
long as its lease. Pages are only ever added to a lease, so a step uploads the
new ones alone. Slots of released leases are taken back when none is free.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from core.errors import Exhausted
from engine.page_pool import Lease

Ints = npt.NDArray[np.int32]


class Slots:
    def __init__(self, count: int, pages: int, device: torch.device) -> None:
        """`count` slots of up to `pages` pages, and one more row that stands for no sequence."""
        self.table = torch.zeros(count + 1, pages, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(count + 1, dtype=torch.int32, device=device)
        self.padding = count
        self._free = list(range(count))
        self._slots: dict[Lease, int] = {}
        self._known: list[int] = [0] * count  # pages of each slot that the table holds

    def place(self, leases: list[Lease]) -> tuple[list[int], Ints]:
        """The slot of each lease, and what the table lacks: [n, 2], flat place and page."""
        slots = [self._slot(lease) for lease in leases]
        fresh = [
            self._new_pages(slot, lease.pages)
            for slot, lease in zip(slots, leases, strict=True)
            if len(lease.pages) > self._known[slot]
        ]
        return slots, np.concatenate(fresh) if fresh else np.empty((0, 2), dtype=np.int32)

    def _slot(self, lease: Lease) -> int:
        slot = self._slots.get(lease)
        if slot is None:
            if not self._free:
                self._collect()
            slot = self._slots[lease] = self._free.pop()
            self._known[slot] = 0
        return slot

    def _collect(self) -> None:
        for lease in [lease for lease in self._slots if lease.released]:
            self._free.append(self._slots.pop(lease))
        if not self._free:
            raise Exhausted(f"all {self.padding} sequence slots of the device are taken")

    def _new_pages(self, slot: int, pages: list[int]) -> Ints:
        known, width = self._known[slot], self.table.shape[1]
        self._known[slot] = len(pages)
        places = np.arange(known, len(pages), dtype=np.int32) + slot * width
        return np.stack((places, np.asarray(pages[known:], dtype=np.int32)), axis=1)

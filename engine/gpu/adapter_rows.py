"""The rows of a step grouped by the slots of their adapters: the host sorts, kernels read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.engine.gpu.adapter_slots import AdapterSlots
from baton.engine.gpu.batch import Ints, upload, upload_into
from baton.kernels.gpu.latent_low_rank import LatentAdapters
from baton.kernels.gpu.low_rank import (
    MOST_PARTS,
    TILE_ROWS,
    AdapterStack,
    ProductAdapters,
    SlotRows,
)
from baton.kernels.linear import AnyLinear


class StepAdapters(NamedTuple):
    """The adapters of a step's rows, and of the rows that its last layer computes."""

    stacks: dict[AnyLinear, AdapterStack]
    rows: SlotRows
    sampled: SlotRows
    counters: Tensor
    """Of programs that wait for each other; int32, see ProductAdapters."""

    def begin(self) -> None:
        """Called at the start of a step."""
        self.counters.zero_()

    def of_samples(self) -> StepAdapters:
        return self._replace(rows=self.sampled)

    def of_product(self, layer: AnyLinear) -> ProductAdapters | None:
        """The adapters of a layer's product; None if no row has one, or none can add to it."""
        stack = self.stacks.get(layer)
        if stack is None or not len(self.rows.tiles):
            return None
        ready = self.counters[stack.number :]
        return ProductAdapters(stack, self.rows, self.counters[len(self.stacks) :], ready)

    def between(self, layer: AnyLinear) -> LatentAdapters | None:
        """The adapters of a layer between latents and heads; None if they cannot add to it."""
        stack = self.stacks.get(layer)
        return LatentAdapters(stack, self.rows, self.sampled) if stack else None


class AdapterInputs:
    """The adapters of steps. Those of recorded steps are in a buffer that the recordings read."""

    def __init__(self, adapters: AdapterSlots, most: int, device: torch.device) -> None:
        """`most`: rows of the largest recorded step."""
        self._stacks = adapters.stacks
        self._slots = adapters.count
        self._device = device
        size = 2 * most + 3 * tile_count(most, self._slots)
        self._recorded = torch.full((size,), -1, dtype=torch.int32, device=device)
        self._counters = self._new_counters(most)

    def recorded(self, rows: int) -> StepAdapters:
        """The adapters of a recorded step of `rows` rows."""
        there = _rows_in(self._recorded, rows, tile_count(rows, self._slots))
        return StepAdapters(self._stacks, there, there, self._counters)

    def fill(self, slots: Ints) -> None:
        """Fills the buffer for the next replay. `slots` [T]: -1 without an adapter."""
        tiles = tile_count(len(slots), self._slots)
        upload_into(self._recorded, arrange_rows(slots, tiles).joined())

    def of_step(self, slots: Ints, samples: Ints) -> StepAdapters:
        """The adapters of a step that is not recorded."""
        rows, sampled = self._upload(slots), self._upload(slots[samples])
        return StepAdapters(self._stacks, rows, sampled, self._new_counters(len(slots)))

    def _new_counters(self, rows: int) -> Tensor:
        count = len(self._stacks) + MOST_PARTS * tile_count(rows, self._slots)
        return torch.empty(count, dtype=torch.int32, device=self._device)

    def _upload(self, slots: Ints) -> SlotRows:
        arrays = arrange_rows(slots)
        return _rows_in(upload(arrays.joined(), self._device), len(slots), len(arrays.tiles))


class SlotArrays(NamedTuple):
    """SlotRows on the host."""

    slots: Ints
    order: Ints
    tiles: Ints

    def joined(self) -> Ints:
        return np.concatenate((self.slots, self.order, self.tiles.ravel()))


def tile_count(rows: int, slots: int) -> int:
    """The most tiles that a step of `rows` rows needs: a slot's last one may hold a single row."""
    used = min(rows, slots)
    return used + (rows - used) // TILE_ROWS


def arrange_rows(slots: Ints, tiles: int = 0) -> SlotArrays:
    """Sorts rows by their `slots` [T], -1 without an adapter. Adds empty tiles up to `tiles`."""
    order = np.argsort(slots, kind="stable").astype(np.int32)
    used: list[tuple[int, int, int]] = []
    values, starts, counts = np.unique(slots[order], return_index=True, return_counts=True)
    for slot, start, count in zip(values.tolist(), starts.tolist(), counts.tolist(), strict=True):
        if slot >= 0:
            firsts = range(0, count, TILE_ROWS)
            used += [(slot, start + at, min(TILE_ROWS, count - at)) for at in firsts]
    empty = [(-1, 0, 0)] * (tiles - len(used))
    return SlotArrays(slots, order, np.array(used + empty, np.int32).reshape(-1, 3))


def _rows_in(joined: Tensor, rows: int, tiles: int) -> SlotRows:
    """Views of joined arrays on the device."""
    slots, order = joined[: 2 * rows].view(2, rows)
    return SlotRows(slots, order, joined[2 * rows : 2 * rows + 3 * tiles].view(-1, 3))

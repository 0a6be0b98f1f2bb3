"""LoRA adapters on a GPU, in slots at fixed addresses, which recorded steps keep.

A slot holds A and B of all layers in one block, padded to one rank; host memory keeps adapters in
the same form. So a load is one copy, in the order of the steps' stream: steps in flight may still
use the slot's previous adapter.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from baton.core.errors import InvalidAdapter
from baton.core.types import Adapter
from baton.engine.adapter_weights import LowRankPair, places_of, read_pairs
from baton.engine.architecture import Split
from baton.engine.gpu.batch import Ints
from baton.engine.gpu.device import AdapterRoom
from baton.engine.model import Model
from baton.engine.step import AdapterChange, Plan
from baton.engine.tensor_parallel import Group
from baton.kernels.gpu.low_rank import AdapterStack, padded_rank
from baton.kernels.linear import AnyLinear

CHANGE = bytes(4)
"""Prefix of a message to other ranks about a change of adapters; no step begins with it."""


class AdapterSlots:
    """The adapters of this rank's part of a model. Loads run in another thread, one at a time;
    everything else runs in the engine's."""

    def __init__(self, model: Model, room: AdapterRoom, group: Group | None = None) -> None:
        self._model = model
        self._room = room
        self._group = group
        self.rank = padded_rank(room.rank)
        starts: dict[AnyLinear, list[int]] = {}
        for place in places_of(model):
            starts.setdefault(place.layer, []).append(place.start)
        self._starts = starts
        size = sum(self._elements(layer) for layer in starts)
        weight = model.embedding
        self._memory = torch.zeros(room.slots, size, dtype=weight.dtype, device=weight.device)
        self.stacks = self._stacks(self._memory)
        self._free = list(range(room.slots))
        self._slots: dict[bytes, int] = {}
        self._host: OrderedDict[bytes, Tensor] = OrderedDict()  # most recently loaded last

    @property
    def count(self) -> int:
        return self._room.slots

    def load_adapter(self, adapter: Adapter) -> Tensor:
        """Returns the block for a slot, in host memory."""
        found = self._host.pop(adapter.digest, None)
        if found is None:
            found = self._read(adapter)
        self._host[adapter.digest] = found
        while len(self._host) > max(1, self._room.host_memory // found.nbytes):
            self._host.popitem(last=False)
        return found

    def add_adapter(self, adapter: Adapter, weights: Tensor) -> None:
        slot = self._slots[adapter.digest] = self._free.pop()
        self._memory[slot].copy_(weights, non_blocking=True)
        self._broadcast(AdapterChange(adapter, loaded=True))

    def drop_adapter(self, digest: bytes) -> None:
        self._free.append(self._slots.pop(digest))
        self._broadcast(AdapterChange(Adapter(digest, ""), loaded=False))

    def follow(self, message: bytes) -> None:
        """Called on other ranks: makes the change that rank 0 has made."""
        adapter, loaded = pickle.loads(message[len(CHANGE) :])
        if loaded:
            self.add_adapter(adapter, self.load_adapter(adapter))
        else:
            self.drop_adapter(adapter.digest)

    def slots_of(self, rows: Plan) -> Ints | None:
        """The slot of each row's adapter, or -1; None if no row has an adapter."""
        digests = [sequence.work.adapter_digest for sequence in rows]
        if not any(digests):
            return None
        slots = [self._slots[digest] if digest else -1 for digest in digests]
        return np.repeat(np.array(slots, np.int32), list(rows.values()))

    def _broadcast(self, change: AdapterChange) -> None:
        if self._group:
            self._group.broadcast(CHANGE + pickle.dumps(change))

    def _read(self, adapter: Adapter) -> Tensor:
        memory = self._memory
        pinned = memory.device.type == "cuda"
        block = torch.zeros(1, memory.shape[1], dtype=memory.dtype, pin_memory=pinned)
        stacks = self._stacks(block)
        split = self._group.split if self._group else Split()
        with torch.inference_mode():
            for pair in read_pairs(adapter, self._model, split):
                self._fill(stacks[pair.place.layer], pair)
        return block[0]

    def _fill(self, stack: AdapterStack, pair: LowRankPair) -> None:
        place, rank = pair.place, len(pair.a)
        if rank > self._room.rank:
            raise InvalidAdapter(
                f"{place.module} has rank {rank}; the configuration allows {self._room.rank}"
                " (adapter_rank)"
            )
        first = self._starts[place.layer].index(place.start) * self.rank
        stack.a[0, first : first + rank] = pair.a
        stack.b[0, place.start : place.start + place.outputs, :rank] = pair.b

    def _stacks(self, memory: Tensor) -> dict[AnyLinear, AdapterStack]:
        """Views of memory [slots, elements]."""
        stacks: dict[AnyLinear, AdapterStack] = {}
        first = 0
        for layer, starts in self._starts.items():
            outputs, inputs = layer.weight.shape
            ends = (*starts[1:], outputs)
            second = first + len(ends) * self.rank * inputs
            end = second + outputs * self.rank
            stacks[layer] = AdapterStack(
                memory[:, first:second].view(len(memory), -1, inputs),
                memory[:, second:end].view(len(memory), outputs, self.rank),
                ends,
                len(stacks),
            )
            first = end
        return stacks

    def _elements(self, layer: AnyLinear) -> int:
        outputs, inputs = layer.weight.shape
        elements: int = self.rank * (outputs + len(self._starts[layer]) * inputs)
        return elements

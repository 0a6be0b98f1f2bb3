"""Loads the experts of a layer: routed and shared ones, their biases and their router."""

from __future__ import annotations

import math

from torch import Tensor

from baton.engine.rotations import separate_pairs
from baton.engine.tensor_parallel import Group, SummedExperts
from baton.engine.weight_reader import WeightReader
from baton.kernels.experts import NO_BIASES, ExpertBiases, Experts
from baton.kernels.linear import Linear
from baton.kernels.routing import Routing

EXPERTS = ("mlp.", "block_sparse_moe.")
SHARED_EXPERTS = ("shared_expert.", "shared_experts.")
ROUTERS = ("gate", "router")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_PROJECTIONS = ("w1", "w3", "w2")
"""Alternative names in checkpoints. The first one present is used."""


class ExpertLoader:
    def __init__(self, reader: WeightReader, group: Group | None) -> None:
        self._reader = reader
        self._source = reader.source
        self._architecture = reader.architecture
        self._split = reader.split
        self._group = group

    def load(self, layer: str) -> Experts:
        """`layer` is the prefix of the layer's tensors."""
        routing, hidden = self._architecture.routing, self._architecture.hidden
        assert routing is not None
        prefix = layer + self._reader.stored(EXPERTS, lambda name: f"{layer}{name}gate.weight")
        gate_up = self._reader.empty(routing.every, 2 * routing.columns, hidden)
        down = self._reader.empty(routing.every, hidden, routing.columns)
        self._load_routed(prefix + "experts.", gate_up[: routing.experts], down)
        if routing.shared:
            self._load_shared(prefix, gate_up[routing.experts :], down[routing.experts :])
        biases = self._biases(prefix + "experts.", routing)
        router, correction = self._router(prefix, routing)
        parts = (routing, router, correction, gate_up, down, self._architecture.activation, biases)
        return SummedExperts(self._group, *parts) if self._group else Experts(*parts)

    def _router(self, prefix: str, routing: Routing) -> tuple[Linear, Tensor | None]:
        """The router, and the correction of its scores."""
        weight = self._reader.empty(routing.outputs, self._architecture.hidden)
        name = prefix + self._reader.stored(ROUTERS, lambda name: f"{prefix}{name}.weight")
        self._source.copy(f"{name}.weight", weight[: routing.experts])
        if routing.shared_gate:
            self._source.copy(f"{prefix}shared_expert_gate.weight", weight[routing.experts :])
        bias = self._reader.tensor(f"{name}.bias", routing.outputs) if routing.biased else None
        correction = None
        if routing.corrected:
            correction = self._reader.empty(routing.experts).float()
            self._source.copy(f"{name}.e_score_correction_bias", correction)
        return Linear(weight, bias), correction

    def _load_routed(self, prefix: str, gate_up: Tensor, down: Tensor) -> None:
        """gate_up [experts, 2 * columns, hidden]; down [experts or more, hidden, columns].

        Stored one by one, or all as one tensor.
        """
        columns = down.shape[2]
        if self._architecture.interleaved:
            pairs = self._reader.cut(2, 2 * columns)
            name = f"{prefix}gate_up_proj"
            self._source.copy(name, gate_up.transpose(1, 2), separate_pairs, pairs)
            cut = self._reader.cut(1, columns)
            self._source.copy(f"{prefix}down_proj", down.transpose(1, 2), cut=cut)
            return
        if f"{prefix}gate_up_proj" in self._source:
            halves = self._reader.cut(1, columns, columns)
            self._source.copy(f"{prefix}gate_up_proj", gate_up, cut=halves)
            cut = self._reader.cut(2, columns)
            self._source.copy(f"{prefix}down_proj", down[: len(gate_up)], cut=cut)
            return
        names = (PROJECTIONS, MIXTRAL_PROJECTIONS)
        gate, up, out = self._reader.stored(names, lambda each: f"{prefix}0.{each[0]}.weight")
        for index, both in enumerate(gate_up):
            for name, target in ((gate, both[:columns]), (up, both[columns:])):
                cut = self._reader.cut(0, columns)
                self._source.copy(f"{prefix}{index}.{name}.weight", target, cut=cut)
            cut = self._reader.cut(1, columns)
            self._source.copy(f"{prefix}{index}.{out}.weight", down[index], cut=cut)

    def _biases(self, prefix: str, routing: Routing) -> ExpertBiases:
        """Only rank 0 has the biases of projections onto the residual, which ranks add up."""
        if not routing.biased:
            return NO_BIASES
        gate_up, down = self._reader.empty(routing.every, 2 * routing.columns), None
        pairs = self._reader.cut(1, 2 * routing.columns)
        self._source.copy(f"{prefix}gate_up_proj_bias", gate_up, separate_pairs, pairs)
        if self._split.rank:
            self._source.skip(f"{prefix}down_proj_bias")
        else:
            shape = (routing.every, self._architecture.hidden)
            down = self._reader.tensor(f"{prefix}down_proj_bias", *shape)
        return ExpertBiases(gate_up, down)

    def _load_shared(self, prefix: str, gate_up: Tensor, down: Tensor) -> None:
        """gate_up [shared, 2 * columns, hidden]; down [shared, hidden, columns].

        Stored as one MLP: its columns are split over the experts, and each expert's over the ranks.
        """
        shared, hidden, columns = down.shape
        rank, cut = self._split.rank, (shared, self._split.size, columns)
        stored = self._reader.stored(SHARED_EXPERTS, lambda name: f"{prefix}{name}down_proj.weight")
        for index, name in enumerate(PROJECTIONS[:2]):
            whole = self._reader.tensor(f"{prefix}{stored}{name}.weight", math.prod(cut), hidden)
            gate_up.view(shared, 2, columns, hidden)[:, index] = whole.view(*cut, hidden)[:, rank]
        whole = self._reader.tensor(f"{prefix}{stored}down_proj.weight", hidden, math.prod(cut))
        down.copy_(whole.view(hidden, *cut)[:, :, rank].transpose(0, 1))

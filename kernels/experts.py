"""The MLP or experts that follow attention in a layer.

On a CPU rows are gathered by expert, so that each chosen expert's weights are read once and the
others' not at all. A row's results do not depend on the other rows: see kernels/linear.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels.linear import Activation, GatedLinear, Linear, RMSNorm, WeightCodes
from baton.kernels.low_rank import AdaptedRows
from baton.kernels.routing import Routing


class MLP:
    """down(gate_up(x))"""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: GatedLinear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def quantize(self, kind: WeightCodes) -> None:
        """As Linear.quantize."""
        self.gate_up.quantize(kind)
        self.down.quantize(kind)

    def pack(self) -> None:
        """As Linear.pack."""
        self.gate_up.pack()
        self.down.pack()

    def add_to(
        self,
        residual: Tensor,
        norm: RMSNorm | None,
        after: RMSNorm | None = None,
        adapted: AdaptedRows | None = None,
    ) -> Tensor:
        """residual [rows, hidden] + the MLP of the residual. Its input is normalized by `norm`, its
        result by `after`, if given."""
        return self.down.add_to(residual, self.gate_up(residual, norm, adapted), after, adapted)


class ExpertBiases(NamedTuple):
    """The biases of experts' products."""

    gate_up: Tensor | None = None  # [every, 2 * columns]
    down: Tensor | None = None  # [every, hidden]


NO_BIASES = ExpertBiases()


class Experts:
    """The weighted sum of the MLPs that the expert router chooses for a row."""

    __slots__ = (
        "_each",
        "activation",
        "biases",
        "correction",
        "down",
        "gate_up",
        "router",
        "routing",
    )

    def __init__(
        self,
        routing: Routing,
        router: Linear,
        correction: Tensor | None,
        gate_up: Tensor,
        down: Tensor,
        activation: Activation = "silu",
        biases: ExpertBiases = NO_BIASES,
    ) -> None:
        self.routing = routing
        self.router = router  # [outputs, hidden]
        self.correction = correction  # [experts], float32
        self.gate_up = gate_up  # [every, 2 * columns, hidden]
        self.down = down  # [every, hidden, columns]
        self.activation = activation
        self.biases = biases
        ups, downs = ([None] * len(down) if each is None else each for each in biases)
        self._each = [
            MLP(GatedLinear(up, up_bias, activation), Linear(out, out_bias))
            for up, up_bias, out, out_bias in zip(gate_up, ups, down, downs, strict=True)
        ]

    def quantize(self, kind: WeightCodes) -> None:
        """As Linear.quantize; the router stays as it is."""
        for expert in self._each:
            expert.quantize(kind)
        self._drop_buffers()

    def pack(self) -> None:
        """As Linear.pack."""
        self.router.pack()
        for expert in self._each:
            expert.pack()
        self._drop_buffers()

    def _drop_buffers(self) -> None:
        """Frees the stacked weights once no expert reads them."""
        if all(expert.down.weight.is_meta for expert in self._each):
            self.gate_up, self.down = (
                torch.empty_like(each, device="meta") for each in (self.gate_up, self.down)
            )

    def __call__(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """x [rows, hidden], normalized if a norm is given -> the sums, [rows, hidden], float32."""
        chosen, weights = route(self.router(x, norm).float(), self.routing, self.correction)
        parts = self._products(x, norm, chosen).float() * weights.unsqueeze(2)
        total = parts[:, 0]
        for rank in range(1, self.routing.per_row):
            total = total + parts[:, rank]
        return total

    def add_to(
        self,
        residual: Tensor,
        norm: RMSNorm | None,
        after: RMSNorm | None = None,
        adapted: AdaptedRows | None = None,
    ) -> Tensor:
        """residual [rows, hidden] + the experts' sum for the residual, as MLP.add_to. Adapters do
        not apply to experts."""
        total = self(residual, norm)
        if after:
            return after.add_to(residual, total.to(residual.dtype))
        return total.add_(residual).to(residual.dtype)

    def _products(self, x: Tensor, norm: RMSNorm | None, chosen: Tensor) -> Tensor:
        """x [rows, hidden] and chosen [rows, per_row] -> [rows, per_row, hidden]."""
        order = chosen.flatten().argsort(stable=True)
        rows = x[order // self.routing.per_row]
        found, end = [x[:0]], 0
        for expert, count in enumerate(torch.bincount(chosen.flatten()).tolist()):
            if count:
                mlp, start, end = self._each[expert], end, end + count
                found.append(mlp.down(mlp.gate_up(rows[start:end], norm)))
        parts = torch.empty(len(order), x.shape[1], dtype=x.dtype)
        parts[order] = torch.cat(found)
        return parts.view(*chosen.shape, -1)


def route(logits: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """logits [rows, outputs], float32 -> experts and their weights, both [rows, per_row]."""
    own = logits[:, : routing.experts]
    scores = own.softmax(dim=-1) if routing.scores == "softmax" else _sigmoid(own)
    ranked = scores if correction is None else scores + correction
    if routing.groups > 1:
        ranked = _in_best_groups(ranked, routing)
    chosen = _best(ranked, routing.top_k)
    weights = scores.gather(1, chosen)
    if routing.normalized:
        weights = weights / (_in_order(weights) + 1e-20)
    weights = weights * routing.scale
    if not routing.shared:
        return chosen, weights
    ids = torch.arange(routing.experts, routing.every).expand(len(logits), -1)
    gates = _sigmoid(logits[:, routing.experts :]) if routing.shared_gate else weights.new_ones(1)
    return torch.cat((chosen, ids), 1), torch.cat((weights, gates.expand(ids.shape)), 1)


def _sigmoid(values: Tensor) -> Tensor:
    """A sigmoid that treats all numbers alike: torch's has other bits for a tensor's last few."""
    return torch.stack((values, torch.zeros_like(values)), dim=-1).softmax(dim=-1)[..., 0]


def _in_best_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """Replaces scores outside the best groups by minus infinity."""
    grouped = ranked.view(len(ranked), routing.groups, -1)
    ordered = grouped.sort(dim=-1, descending=True).values[..., : routing.group_best]
    best = _best(_in_order(ordered).squeeze(-1), routing.top_groups)
    kept = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~kept.unsqueeze(2), -torch.inf).flatten(1)


def _best(scores: Tensor, count: int) -> Tensor:
    """The columns of the highest scores, highest first; among equal scores the lowest column."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _in_order(values: Tensor) -> Tensor:
    """Sums over the last dimension, from its first number to its last, and keeps it."""
    total = values[..., :1]
    for column in range(1, values.shape[-1]):
        total = total + values[..., column : column + 1]
    return total

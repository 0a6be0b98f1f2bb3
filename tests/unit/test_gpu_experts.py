"""Routing and the products of experts against their references in torch."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import assert_close, types_for
from torch import Tensor

from baton.kernels import experts as reference
from baton.kernels.experts import NO_BIASES, ExpertBiases
from baton.kernels.gpu.experts import (
    LARGEST,
    TILINGS,
    gated,
    most_tiles,
    rows_of_tilings,
    sum_parts,
    tiling_for,
    weighted,
)
from baton.kernels.gpu.experts_of_row import weighted_onto
from baton.kernels.gpu.norm import scale_rows
from baton.kernels.gpu.routing import Routed, route
from baton.kernels.linear import Activation, Linear, gate_and_multiply
from baton.kernels.routing import Routing

ROUTINGS = {
    "softmax": Routing(8, 2, 24, normalized=True),
    "shared gate": Routing(5, 3, 40, shared=2, shared_gate=True),
    "sigmoid": Routing(12, 4, 24, scores="sigmoid", corrected=True, scale=2.5, shared=1),
    "groups": Routing(20, 3, 24, groups=4, top_groups=2, scale=16.0),
    "corrected groups": Routing(20, 3, 24, scores="sigmoid", corrected=True, normalized=True,
                                groups=4, top_groups=2, group_best=2),
    "one": Routing(1, 1, 24),
    "whole tiles": Routing(4, 2, 128),
    "biased": Routing(6, 3, 24, normalized=True, biased=True),
}  # fmt: skip
CASES = [(name, rows) for name in ROUTINGS for rows in (1, 7)]
CASES += [("shared gate", 40), ("corrected groups", 40), ("whole tiles", 150)]
CASES += [("whole tiles", 110), ("one", 150)]  # tiles of all widths


class Case:
    """Rows and weights of a mixture."""

    def __init__(self, routing: Routing, rows: int, device: torch.device, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(rows)

        def random(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            return values.to(device, dtype)

        self.routing = routing
        self._hidden = hidden = 128 if routing.columns == 128 else 72
        self.residual, norm = random(rows, hidden), random(hidden)
        self.source = scale_rows(self.residual.clone(), norm, 1e-5)
        self.router = random(routing.outputs, hidden) * 30
        self.correction = random(routing.experts).float() if routing.corrected else None
        self.gate_up = random(routing.every, 2 * routing.columns, hidden)
        self.down = random(routing.every, hidden, routing.columns)
        self.biases = NO_BIASES
        if routing.biased:
            ups, downs = random(routing.every, 2 * routing.columns), random(routing.every, hidden)
            self.biases = ExpertBiases(40 * ups, 10 * downs)
        self.router_bias = random(routing.outputs) * 5 if routing.biased else None

    def route(self) -> Routed:
        router = Linear(self.router, self.router_bias)
        return route(self.source, router, self.correction, self.routing)

    def parts(self, routed: Routed, activation: Activation = "silu") -> Tensor:
        ups, downs = self.biases
        opened = gated(self.source, routed, self.gate_up, activation, ups)
        return weighted(opened, routed, self.down, downs)

    def normed(self) -> Tensor:
        assert self.source.squares is not None
        mean = self.source.squares.double().sum(dim=0) / self._hidden
        return self.source.x.double() * (mean + self.source.epsilon).rsqrt().unsqueeze(1)

    def wanted(self) -> tuple[Tensor, Tensor]:
        """Experts and weights [T, per_row], on the CPU."""
        logits = self.normed() @ self.router.double().T
        if self.router_bias is not None:
            logits += self.router_bias
        logits = logits.float().cpu()
        correction = None if self.correction is None else self.correction.cpu()
        return reference.route(logits, self.routing, correction)


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_rows_go_to_the_experts_of_the_reference(
    device: torch.device, name: str, rows: int
) -> None:
    for dtype in types_for(device, torch.bfloat16):
        case = Case(ROUTINGS[name], rows, device, dtype)
        routed, (chosen, weights) = case.route(), case.wanted()
        torch.testing.assert_close(routed.weights.cpu(), weights, rtol=1e-4, atol=1e-5)
        assert routed.chosen.tolist() == chosen.tolist()
        if routed.pairs is None or routed.starts is None:
            assert rows == 1
            continue
        assert routed.pairs.tolist() == chosen.flatten().argsort(stable=True).tolist()
        counts = torch.bincount(chosen.flatten(), minlength=case.routing.every)
        assert routed.starts.tolist() == [0, *counts.cumsum(0).tolist()]


@pytest.mark.parametrize(
    ("name", "rows", "activation"),
    [
        *((*case, "silu") for case in CASES),
        ("shared gate", 7, "gelu_tanh"),
        ("biased", 7, "clamped_swiglu"),
        ("biased", 40, "clamped_swiglu"),
    ],
)
def test_experts_outputs_are_those_of_the_reference(
    device: torch.device, name: str, rows: int, activation: Activation
) -> None:
    for dtype in types_for(device, torch.bfloat16):
        case = Case(ROUTINGS[name], rows, device, dtype)
        parts = case.parts(case.route(), activation)
        chosen, weights = (each.to(device) for each in case.wanted())
        gate_up = torch.einsum("th,tknh->tkn", case.normed(), case.gate_up.double()[chosen])
        gate_up = gate_up.to(dtype).double()
        ups, downs = case.biases
        if ups is not None:
            gate_up += ups[chosen]
        hidden = gate_and_multiply(gate_up, activation).to(dtype).double()
        wanted = torch.einsum("tkn,tkhn->kth", hidden, case.down.double()[chosen])
        if downs is not None:
            wanted += downs[chosen].transpose(0, 1)
        wanted = wanted * weights.double().T.unsqueeze(2)
        assert_close(parts, wanted.to(dtype))
        assert_close(sum_parts(parts), wanted.sum(dim=0).to(dtype))


@pytest.mark.parametrize("name", ["softmax", "shared gate", "whole tiles", "biased"])
def test_a_row_alone_gets_its_experts_sum_and_norm_at_once(device: torch.device, name: str) -> None:
    for dtype in types_for(device, torch.bfloat16):
        case = Case(ROUTINGS[name], 1, device, dtype)
        routed, norm = case.route(), case.residual[0].abs() + 0.5
        ups, downs = case.biases
        opened = gated(case.source, routed, case.gate_up, "silu", ups)
        residual, wanted = case.residual.clone(), case.residual.clone()
        found = weighted_onto(opened, routed, case.down, downs, residual, norm, 1e-5)
        parts = weighted(opened, routed, case.down, downs)
        scaled = scale_rows(wanted, norm, 1e-5, parts)
        assert_close(residual, wanted)
        assert_close(found.x, scaled.x)
        assert found.squares is not None
        assert scaled.squares is not None
        assert_close(found.squares.sum(dim=0), scaled.squares.sum(dim=0))


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_equal_scores_go_to_the_lowest_ids_and_no_numbers_to_real_experts(
    device: torch.device,
) -> None:
    case = Case(Routing(8, 3, 24), 2, device, torch.float32)
    case.router.zero_()
    assert case.route().chosen.tolist() == [[0, 1, 2]] * 2
    case.router.fill_(torch.nan)
    assert set(case.route().chosen.flatten().tolist()) <= set(range(8))


@pytest.mark.parametrize(("pairs", "experts", "tile"), [(1, 8, 16), (40, 8, 16), (1000, 8, 128)])
def test_no_choice_needs_more_tiles(pairs: int, experts: int, tile: int) -> None:
    used = min(pairs, experts)
    ragged = [1 + (pairs - used) // tile * tile, *[1] * (used - 1)]
    assert sum(-(-count // tile) for count in ragged) <= most_tiles(pairs, experts, tile)


@pytest.mark.parametrize("routing", [Routing(128, 8, 24), Routing(5, 3, 24, shared=2)])
def test_the_rows_of_all_tilings_meet_each(routing: Routing) -> None:
    met = [tiling_for(rows * routing.per_row, routing.every) for rows in rows_of_tilings(routing)]
    assert met == [*TILINGS.values(), LARGEST]


def test_no_rows_have_no_parts(device: torch.device) -> None:
    """The last layer of a step that samples nothing."""
    case = Case(ROUTINGS["shared gate"], 0, device, torch.float32)
    assert case.parts(case.route()).shape == (5, 0, 72)

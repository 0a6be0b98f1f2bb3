"""Rotation fused with the store into pages, against its reference."""

from __future__ import annotations

import math

import kernel_reference as reference
import pytest
import torch
from torch import Tensor

from baton.kernels.attention import Scoring
from baton.kernels.gpu.norm import Scaled
from baton.kernels.gpu.rotary import HeadShape, Projected, norm_projections, rotate_and_store

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PAGES, LAYERS, PAGE_SIZE, POSITIONS = 9, 2, 5, 100


class Case:
    """One chunk of random tokens that go to random slots of the second layer."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        tokens: int,
        heads: int,
        kv_heads: int,
        dim: int,
        norms: bool = False,
        late: bool = False,
    ) -> None:
        self.generator = torch.Generator().manual_seed(tokens * heads + dim)
        self.device, self.dtype = device, dtype
        self.heads, self.kv_heads = heads, kv_heads
        self.qkv = self.random(tokens, (heads + 2 * kv_heads) * dim)
        angles = torch.rand(POSITIONS, dim // 2, generator=self.generator) * 2 * math.pi
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
        self.positions = torch.randint(POSITIONS, (tokens,), generator=self.generator).to(device)
        slots = torch.randperm(PAGES * PAGE_SIZE, generator=self.generator)[:tokens]
        self.slots = slots.to(device)
        shape = (PAGES, LAYERS, 2, PAGE_SIZE, kv_heads, dim)
        self.kv = torch.full(shape, math.nan, dtype=dtype, device=device)
        self.source = self.bias = None
        if late:
            squares = 20 * torch.rand(1, tokens, generator=self.generator).to(device)
            self.source = Scaled(self.random(tokens, 20), squares, 1e-5)
            self.bias = self.random(self.qkv.shape[1])
        self.norms = (self.random(dim), self.random(dim)) if norms else (None, None)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def check(self, rotates: bool = True) -> None:
        """Runs kernel and reference on copies of the same memory, and compares these."""
        qkv, kv = self.qkv.clone(), self.kv.clone()
        for function, one_qkv, one_kv in (
            (reference.rotate_and_store, qkv, kv),
            (rotate_and_store, self.qkv, self.kv),
        ):
            layer, places = one_kv[:, 1], (self.positions, self.slots)
            shape = HeadShape(
                self.heads, self.kv_heads, layer.shape[4], None, rotates, 1e-6, Scoring(1.0)
            )
            projected = Projected(one_qkv, self.source, self.bias)
            function(projected, self.cos_sin, *places, layer, shape, *self.norms)
        # A norm that rounds the other way reaches both dimensions of a pair.
        step = max(torch.finfo(self.dtype).eps, 1e-6)
        for found, wanted in ((self.qkv, qkv), (self.kv, kv)):
            torch.testing.assert_close(found, wanted, rtol=2 * step, atol=4 * step, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "norms"), [(64, False), (80, True), (96, False), (128, False), (128, True), (256, True)]
)
def test_heads_of_every_size_are_turned_and_stored(
    device: torch.device, dtype: torch.dtype, dim: int, norms: bool
) -> None:
    Case(device, dtype, 3, 4, 2, dim, norms).check()


@pytest.mark.parametrize("tokens", [1, 4, 33])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (7, 1), (9, 3)])
def test_tokens_and_heads_of_any_number_are_turned_and_stored(
    device: torch.device, tokens: int, heads: int, kv_heads: int
) -> None:
    Case(device, torch.bfloat16, tokens, heads, kv_heads, 16, norms=True).check()
    Case(device, torch.float32, tokens, heads, kv_heads, 16, norms=True, late=True).check()


@pytest.mark.parametrize("tokens", [3, 33])
def test_values_are_stored_as_they_are_and_other_memory_keeps_its_poison(
    device: torch.device, tokens: int
) -> None:
    case = Case(device, torch.bfloat16, tokens, 4, 2, 32)
    values = case.qkv.view(tokens, 8, 32)[:, 6:].clone()
    case.check()
    assert case.kv[:, 0].isnan().all()
    by_slot = case.kv[:, 1].transpose(1, 2).flatten(0, 1)  # [slot, 2, kv_head, dim]
    assert torch.equal(by_slot[case.slots, 1], values)
    untouched = torch.ones(len(by_slot), dtype=torch.bool, device=device)
    untouched[case.slots] = False
    assert by_slot[untouched].isnan().all()


@pytest.mark.parametrize("tokens", [4, 33])
def test_a_token_with_a_negative_slot_is_turned_but_not_stored(
    device: torch.device, tokens: int
) -> None:
    case = Case(device, torch.float32, tokens, 4, 2, 32)
    case.slots[1:] = -1
    case.check()
    assert int(case.kv.isfinite().sum()) == 2 * 2 * 32


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_heads_are_normed_together(
    device: torch.device, dtype: torch.dtype, late: bool
) -> None:
    case = Case(device, dtype, 5, 6, 2, 24, late=late)
    norms = case.random(6 * 24), case.random(2 * 24)
    wanted = Projected(case.qkv.clone(), case.source, case.bias)
    wanted = reference.norm_projections(wanted, *norms, 1e-6)
    found = norm_projections(Projected(case.qkv, case.source, case.bias), *norms, 1e-6)
    step = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(found.qkv, wanted.qkv, rtol=2 * step, atol=4 * step)
    assert found.source is None
    assert found.bias is None


def test_the_heads_of_two_ranks_are_normed_together(device: torch.device) -> None:
    case = Case(device, torch.float32, 5, 6, 2, 24, late=True)
    norms = case.random(6 * 24), case.random(2 * 24)
    sums: list[torch.Tensor] = []

    def add_equal_rank(squares: torch.Tensor) -> torch.Tensor:
        sums.append(squares)
        return squares + squares

    alone, shared = (Projected(case.qkv.clone(), case.source, case.bias) for _ in range(2))
    wanted = norm_projections(alone, *norms, 1e-6)
    found = norm_projections(shared, *norms, 1e-6, 2, add_equal_rank)
    assert torch.equal(found.qkv, wanted.qkv)
    assert [each.shape for each in sums] == [(5, 2)]


def test_a_layer_that_does_not_rotate_stores_its_keys_as_they_are(device: torch.device) -> None:
    case = Case(device, torch.bfloat16, 6, 4, 2, 32)
    before = case.qkv.clone()
    case.check(rotates=False)
    assert torch.equal(case.qkv, before)


def test_narrow_positions_do_as_well(device: torch.device) -> None:
    case = Case(device, torch.float32, 6, 4, 2, 32)
    case.positions = case.positions.to(torch.int32)
    case.check()

"""The kernels before and after products against their references, which compute in float64."""

from __future__ import annotations

import math
from typing import get_args

import kernel_reference as reference
import pytest
import torch
from torch import Tensor

from baton.kernels.gpu.gate import gate_and_multiply
from baton.kernels.gpu.norm import Scaled, embed, rms_norm, scale_rows
from baton.kernels.linear import Activation

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 1), (3, 80), (2, 4096), (5, 5120)]
EPSILON = 1e-5


def random(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * 3).to(device, dtype)


def assert_close(found: Tensor, wanted: Tensor, size: float = 0.25) -> None:
    """Equal but for the last bit, or for float32's sums in another order; `size` is that of
    terms that may cancel each other out."""
    step = max(torch.finfo(found.dtype).eps, 1e-6)
    torch.testing.assert_close(found, wanted, rtol=2 * step, atol=step * size)


def assert_scaled(found: Scaled, wanted: Scaled, residual: Tensor) -> None:
    """`residual` as the kernel left it: the interpreter rounds sums another way."""
    assert_close(found.x, wanted.x, size=1.0)
    if residual.dtype is torch.float16:
        assert found.squares is None, "float16 is normed at once"
    else:
        assert found.squares is not None
        torch.testing.assert_close(found.squares[0], residual.float().square().sum(dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_a_norm_matches_the_reference(
    device: torch.device, dtype: torch.dtype, rows: int, size: int
) -> None:
    x, weight = random(device, dtype, rows, size), random(device, dtype, size)
    assert_close(rms_norm(x, weight, EPSILON), reference.rms_norm(x, weight, EPSILON))


def test_many_rows_are_normed(device: torch.device) -> None:
    """More than the few that are read with more warps."""
    x, weight = random(device, torch.float16, 257, 24), random(device, torch.float16, 24)
    assert_close(rms_norm(x, weight, EPSILON), reference.rms_norm(x, weight, EPSILON))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts", "rows", "size"), [(0, 2, 72), (1, 3, 80), (2, 5, 4096)])
def test_parts_are_added_before_rows_are_scaled(
    device: torch.device, dtype: torch.dtype, parts: int, rows: int, size: int
) -> None:
    made = random(device, dtype, parts, rows, size) if parts else None
    weight = random(device, dtype, size)
    residual, wanted = random(device, dtype, rows, size), random(device, dtype, rows, size)
    found = scale_rows(residual, weight, EPSILON, made)
    assert_scaled(found, reference.scale_rows(wanted, weight, EPSILON, made), residual)
    assert_close(residual, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_scaled_as_in_the_reference(
    device: torch.device, dtype: torch.dtype
) -> None:
    embedding, weight = random(device, dtype, 50, 72), random(device, dtype, 72)
    tokens = torch.tensor([3, 49, 0], dtype=torch.int32, device=device)
    residual, scaled = embed(tokens, embedding, weight, EPSILON)
    assert torch.equal(residual, embedding[tokens.long()])
    assert_scaled(scaled, reference.embed(tokens, embedding, weight, EPSILON)[1], residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_enlarged(device: torch.device, dtype: torch.dtype) -> None:
    embedding, weight = random(device, dtype, 50, 72), random(device, torch.float32, 72)
    tokens = torch.tensor([3, 49, 0], dtype=torch.int32, device=device)
    residual, scaled = embed(tokens, embedding, weight, EPSILON, 8.5)
    wanted, wanted_scaled = reference.embed(tokens, embedding, weight, EPSILON, 8.5)
    assert_close(residual, wanted)
    assert_scaled(scaled, wanted_scaled, residual)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_a_part_is_normed_before_it_is_added(
    device: torch.device, dtype: torch.dtype, rows: int, size: int, weighed: bool
) -> None:
    part, after = random(device, dtype, 1, rows, size), random(device, torch.float32, size)
    weight = random(device, torch.float32, size, seed=1) if weighed else None
    residual, wanted = random(device, dtype, rows, size), random(device, dtype, rows, size)
    found = scale_rows(residual, weight, EPSILON, part, after)
    reference.scale_rows(wanted, weight, EPSILON, part, after)
    assert_close(residual, wanted, size=10.0)
    if weight is None:
        assert found.x is residual
        assert found.squares is None
    else:
        assert_scaled(found, reference.scale_rows(residual, weight, EPSILON), residual)


def test_a_row_of_zeros_stays_zero(device: torch.device) -> None:
    x = torch.zeros(2, 64, device=device)
    assert torch.equal(rms_norm(x, torch.ones(64, device=device), EPSILON), x)


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 80), (2, 14336), (11, 1025)])
def test_an_activation_matches_the_reference(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    size: int,
    late: bool,
    activation: Activation,
) -> None:
    gate_up, x = random(device, dtype, rows, 2 * size), random(device, dtype, rows, 20)
    squares = x.float().square().sum(dim=1)[None] if late else None
    bias = random(device, dtype, 2 * size, seed=1) if late else None
    source = Scaled(x, squares, EPSILON)
    found = gate_and_multiply(gate_up, source, bias, activation)
    wanted = reference.gate_and_multiply(gate_up, source, bias, activation)
    assert_close(found, wanted, size=10.0 if late else 0.25)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("activation", get_args(Activation))
def test_an_activation_of_extreme_gates_is_finite(
    device: torch.device, activation: Activation
) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -90.0, 2.0, 2.0, 2.0]], device=device)
    found = gate_and_multiply(gate_up, Scaled(gate_up, None, EPSILON), None, activation)
    most = 3.0 * 7.0 / (1.0 + math.exp(-1.702 * 7.0)) if activation == "clamped_swiglu" else 2e4
    assert_close(found, torch.tensor([[0.0, most, 0.0]], device=device))

"""The norm and activation kernels against their references, which compute in float64."""

from __future__ import annotations

import math

import kernel_reference as reference
import pytest
import torch
from torch import Tensor

from baton.kernels.gpu.linear import Scaled, silu_and_multiply
from baton.kernels.gpu.norm import add_and_norm, add_and_scale, rms_norm

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 1), (3, 80), (2, 4096), (5, 5120)]
EPSILON = 1e-5


def random(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * 3).to(device, dtype)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """Equal but for the last bit, or for float32's sums in another order."""
    step = max(torch.finfo(found.dtype).eps, 1e-6)
    torch.testing.assert_close(found, wanted, rtol=2 * step, atol=step / 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_a_norm_matches_the_reference(
    device: torch.device, dtype: torch.dtype, rows: int, size: int
) -> None:
    x, weight = random(device, dtype, rows, size), random(device, dtype, size)
    out = torch.full_like(x, math.nan)
    assert rms_norm(x, weight, EPSILON, out) is out
    assert_close(out, reference.rms_norm(x, weight, EPSILON))
    assert torch.equal(rms_norm(x, weight, EPSILON), out)


def test_a_norm_reads_and_writes_rows_within_wider_ones(device: torch.device) -> None:
    wide = random(device, torch.bfloat16, 3, 200)
    weight = random(device, torch.bfloat16, 72)
    out = torch.full_like(wide, math.nan)
    rms_norm(wide[:, 16:88], weight, EPSILON, out[:, 16:88])
    assert_close(out[:, 16:88], reference.rms_norm(wide[:, 16:88], weight, EPSILON))
    assert out[:, :16].isnan().all()
    assert out[:, 88:].isnan().all()


def test_many_rows_are_normed(device: torch.device) -> None:
    """More than the few that are read with more warps."""
    x, weight = random(device, torch.float16, 257, 24), random(device, torch.float16, 24)
    assert_close(rms_norm(x, weight, EPSILON), reference.rms_norm(x, weight, EPSILON))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts", "rows", "size"), [(1, 3, 80), (2, 5, 4096), (3, 1, 1)])
def test_parts_are_added_before_they_are_normed(
    device: torch.device, dtype: torch.dtype, parts: int, rows: int, size: int
) -> None:
    made, weight = random(device, dtype, parts, rows, size), random(device, dtype, size)
    residual, wanted = random(device, dtype, rows, size), random(device, dtype, rows, size)
    normed = add_and_norm(made, residual, weight, EPSILON)
    wanted_norm = reference.add_and_norm(made, wanted, weight, EPSILON)
    assert_close(residual, wanted)
    assert_close(normed, wanted_norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (5, 80), (2, 4096)])
def test_a_part_is_added_and_left_scaled_with_its_squares(
    device: torch.device, dtype: torch.dtype, rows: int, size: int
) -> None:
    part, weight = random(device, dtype, rows, size, seed=1), random(device, dtype, size)
    residual, wanted = random(device, dtype, rows, size), random(device, dtype, rows, size)
    found, scaled = (
        Scaled(torch.empty_like(part), torch.empty(1, rows, device=device), EPSILON)
        for _ in range(2)
    )
    add_and_scale(part, residual, weight, found)
    reference.add_and_scale(part, wanted, weight, scaled)
    assert_close(residual, wanted)
    assert_close(found.x, scaled.x)
    torch.testing.assert_close(found.squares[0], residual.float().square().sum(dim=1))


def test_a_row_of_zeros_stays_zero(device: torch.device) -> None:
    x = torch.zeros(2, 64, device=device)
    assert torch.equal(rms_norm(x, torch.ones(64, device=device), EPSILON), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 80), (2, 14336), (11, 1025)])
def test_an_activation_matches_the_reference(
    device: torch.device, dtype: torch.dtype, rows: int, size: int
) -> None:
    gate_up = random(device, dtype, rows, 2 * size)
    out = torch.full((rows, size), math.nan, dtype=dtype, device=device)
    assert silu_and_multiply(gate_up, out) is out
    assert_close(out, reference.silu_and_multiply(gate_up))
    assert torch.equal(silu_and_multiply(gate_up), out)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_an_activation_of_extreme_gates_is_finite(device: torch.device) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -90.0, 2.0, 2.0, 2.0]], device=device)
    assert_close(silu_and_multiply(gate_up), torch.tensor([[0.0, 2e4, 0.0]], device=device))

"""Weights packed for GPUs: what their codes stand for, and products of them."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from baton.kernels.gpu import linear
from baton.kernels.gpu.linear import few_rows, few_rows_alone, few_rows_onto
from baton.kernels.gpu.norm import Scaled
from baton.kernels.gpu.packed_tiles import decoded
from baton.kernels.gpu.tilings import LinearTiling
from baton.kernels.linear import Activation
from baton.kernels.packed import INPUTS, Bits, Grid, PackedWeight, pack, quantize_to_packed

BOTH: list[Bits] = [4, 8]


def random_grid(outputs: int, inputs: int, group: int, bits: Bits, *, middle: bool = False) -> Grid:
    """Scales are powers of two: sums of products with whole numbers are exact in float32."""
    torch.manual_seed(outputs + inputs)
    size = outputs, inputs // group
    zeros = torch.randint(0, 2**bits + 1, size).float()
    if middle:
        zeros.fill_(2 ** (bits - 1))
    spread = group // INPUTS
    scales = torch.exp2(torch.randint(-6, -3, size).float())
    return Grid(scales.repeat_interleave(spread, 1), zeros.repeat_interleave(spread, 1), bits)


def random_numbers(inputs: int, grid: Grid) -> Tensor:
    """What random codes stand for."""
    codes = torch.randint(0, 2**grid.bits, (len(grid.scales), inputs))
    zeros, scales = (each.repeat_interleave(INPUTS, 1) for each in (grid.zeros, grid.scales))
    return (codes - zeros) * scales


def packed_of(numbers: Tensor, grid: Grid) -> PackedWeight:
    packed = pack(numbers, grid)
    assert packed is not None
    return packed


@pytest.mark.parametrize("bits", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_codes_stand_for_the_numbers_they_were_made_of(
    bits: Bits, dtype: torch.dtype, group: int
) -> None:
    grid = random_grid(24, 256, group, bits)
    grid = Grid((grid.scales * 1.1).half().float(), grid.zeros, bits)
    numbers = random_numbers(256, grid).to(dtype)
    packed = packed_of(numbers, grid)
    assert (packed.shape, packed.group) == (numbers.shape, group)
    assert packed.exact == (dtype != torch.bfloat16)
    assert packed.words.nbytes == numbers.numel() * bits // 8
    assert torch.equal(packed.numbers(), numbers)


def test_groups_with_the_same_scale_are_one() -> None:
    grid = random_grid(8, 512, 512, 4)
    assert packed_of(random_numbers(512, grid), grid).group == 128


def test_what_no_codes_stand_for_is_not_packed() -> None:
    grid = random_grid(8, 64, 32, 4)
    numbers = random_numbers(64, grid)
    assert pack(numbers, grid) is not None
    assert pack(numbers + 0.001, grid) is None
    assert pack(numbers, grid._replace(scales=grid.scales * 1.0001)) is None
    assert pack(numbers, grid._replace(zeros=grid.zeros + 0.5)) is None
    assert pack(numbers, grid._replace(zeros=grid.zeros - 20)) is None
    assert pack(numbers * torch.inf, grid._replace(scales=grid.scales * torch.inf)) is None
    small = grid._replace(scales=grid.scales * 2.0**-40)
    assert pack((numbers * 2.0**-40).half(), small) is None


@pytest.mark.parametrize(("bits", "group", "most"), [(4, 64, 0.1), (8, 128, 0.008)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_quantized_weight_is_near(
    bits: Bits, group: int, most: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(bits)
    weight = torch.randn(48, 256).to(dtype)
    weight[3] = 0.0
    packed = quantize_to_packed(weight, bits)
    assert packed is not None
    assert (packed.group, packed.exact, packed.dtype) == (group, True, dtype)
    lost = (packed.numbers().float() - weight.float()).norm() / weight.float().norm()
    assert 0 < lost < most
    assert not packed.numbers()[3].any()


def test_inputs_that_fill_no_word_are_not_quantized() -> None:
    assert quantize_to_packed(torch.randn(8, 80), 4) is None


@pytest.mark.parametrize("bits", BOTH)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 256), (72, 96), (130, 320)])
def test_weights_are_decoded(device: torch.device, bits: Bits, outputs: int, inputs: int) -> None:
    grid = random_grid(outputs, inputs, 32, bits)
    numbers = random_numbers(inputs, grid).to(device)
    assert torch.equal(decoded(packed_of(numbers, grid.to(str(device)))), numbers)


@pytest.mark.parametrize("bits", BOTH)
@pytest.mark.parametrize("middle", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group"),
    [(1, 64, 256, 128), (5, 72, 96, 32), (32, 48, 320, 64), (40, 130, 128, 128)],
)
def test_products_are_those_of_what_the_codes_stand_for(
    device: torch.device,
    bits: Bits,
    middle: bool,
    rows: int,
    outputs: int,
    inputs: int,
    group: int,
) -> None:
    """Bit for bit: numbers are whole, so that any order of their sums is exact."""
    grid = random_grid(outputs, inputs, group, bits, middle=middle)
    numbers = random_numbers(inputs, grid).to(device)
    weight = packed_of(numbers, grid.to(str(device)))
    x, residual = (
        torch.randint(-4, 5, (rows, size)).float().to(device) for size in (inputs, outputs)
    )
    norm, bias = (torch.randint(-4, 5, (outputs,)).float().to(device) for _ in range(2))
    wanted = x @ numbers.t()
    assert torch.equal(few_rows_alone(x, weight), wanted)
    found, summed = residual.clone(), residual.clone()
    left = few_rows_onto(x, weight, found, norm, 1e-5, bias)
    plain = few_rows_onto(x, numbers, summed, norm, 1e-5, bias)
    assert torch.equal(found, residual + wanted + bias)
    assert left.squares is not None
    assert plain.squares is not None
    assert torch.equal(left.x, plain.x)
    assert torch.equal(left.squares, plain.squares)
    squares = torch.rand(3, rows, device=device) * inputs
    for source in (Scaled(x, None, 1e-5), Scaled(x, squares, 1e-5)):
        for gates in (None, *get_args(Activation)):
            found = few_rows(source, weight, bias, gates)
            assert torch.equal(found, few_rows(source, numbers, bias, gates)), gates


@pytest.mark.parametrize("bits", BOTH)
@pytest.mark.parametrize(("outputs", "rows"), [(64, 16), (128, 32)])
def test_a_group_may_be_of_several_iterations(
    device: torch.device, bits: Bits, outputs: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiling = LinearTiling(outputs, 64, outputs // 16, 2, rows)
    monkeypatch.setattr(linear, "packed_tiling_for", lambda *_: tiling)
    for inputs in (256, 320):
        grid = random_grid(128, inputs, 128 if inputs == 256 else 64, bits)
        numbers = random_numbers(inputs, grid).to(device)
        weight = packed_of(numbers, grid.to(str(device)))
        x = torch.randint(-4, 5, (40, inputs)).float().to(device)
        assert torch.equal(few_rows_alone(x, weight), x @ numbers.t())

"""Compiled products of packed weights, bit for bit those of the weights the codes stand for."""

from __future__ import annotations

import pytest
import torch
from pools import CUDA
from torch import Tensor

from baton.engine.gpu.numerics import Numerics
from baton.kernels.gpu.linear import few_rows, few_rows_alone, few_rows_onto
from baton.kernels.gpu.norm import Scaled
from baton.kernels.gpu.packed_tiles import decoded
from baton.kernels.gpu.tilings import MOST_ROWS, PACKED_ROWS
from baton.kernels.linear import Activation
from baton.kernels.packed import INPUTS, Bits, Grid, PackedWeight, pack

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")

ROWS = (1, 2, 5, 16, 17, 32, 33, 64, 65, 100, 128, 129, 200, 256)
PRODUCTS = [(4096, 4096, 128), (1536, 8960, 128), (960, 576, 64), (200, 544, 32)]
"""Outputs, inputs and a group's inputs."""


def random_rows(size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(size)
    return torch.randn(PACKED_ROWS, size, generator=generator, device="cuda").to(dtype)


def random_weight(
    outputs: int, inputs: int, group: int, bits: Bits, dtype: torch.dtype, scales: torch.dtype
) -> PackedWeight:
    """With every code, and scales of that type."""
    generator = torch.Generator("cuda").manual_seed(outputs + bits)
    shape = outputs, inputs // group
    factors = torch.rand(shape, generator=generator, device="cuda").add_(0.5) * 0.04 / 2**bits
    factors = factors.to(scales).float().repeat_interleave(group // INPUTS, dim=1)
    zeros = torch.randint(0, 2**bits + 1, shape, generator=generator, device="cuda").float()
    zeros = zeros.repeat_interleave(group // INPUTS, dim=1)
    codes = torch.randint(0, 2**bits, (outputs, inputs), generator=generator, device="cuda")
    spread = (each.repeat_interleave(INPUTS, dim=1) for each in (zeros, factors))
    numbers = ((codes - next(spread)) * next(spread)).to(dtype)
    packed = pack(numbers, Grid(factors, zeros, bits))
    assert packed is not None
    assert packed.group == group
    assert torch.equal(packed.numbers(), numbers)
    return packed


Size = tuple[int, int, int]
Kind = tuple[torch.dtype, torch.dtype]
BITS: list[Bits] = [4, 8]
KINDS: list[Kind] = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.float16),
]


GATES: list[Activation | None] = [None, "silu"]
EVERY = [(size, kind, bits) for size in PRODUCTS for kind in KINDS for bits in BITS]


@pytest.mark.parametrize(("size", "kind", "bits"), EVERY)
def test_weights_are_decoded(size: Size, kind: Kind, bits: Bits) -> None:
    weight = random_weight(*size, bits, *kind)
    found, wanted = decoded(weight), weight.numbers()
    assert int((found != wanted).sum()) == 0


@pytest.mark.parametrize(("size", "kind", "bits"), EVERY)
def test_products_have_the_bits_of_decoded_weights(size: Size, kind: Kind, bits: Bits) -> None:
    weight = random_weight(*size, bits, *kind)
    numbers, x = weight.numbers(), random_rows(size[1], kind[0])
    few, many = few_rows_alone(x[:MOST_ROWS], numbers), few_rows_alone(x, weight)
    wrong = {}
    for rows in ROWS:
        found = few_rows_alone(x[:rows], weight)
        with Numerics.INVARIANT.library(rows):
            product = torch.mm(x[:rows], numbers.t())
        differ = found[:MOST_ROWS] != few[:rows], found != product, found != many[:rows]
        if any(each.any() for each in differ):
            wrong[rows] = [int(each.sum()) for each in differ]
    assert not wrong, "by rows: numbers unlike ours of plain weights, the library's, more rows'"


@pytest.mark.parametrize(("size", "kind", "bits"), EVERY)
def test_residuals_have_the_bits_of_decoded_weights(size: Size, kind: Kind, bits: Bits) -> None:
    weight = random_weight(*size, bits, *kind)
    numbers, x = weight.numbers(), random_rows(size[1], kind[0])
    residual, norm = random_rows(size[0], kind[0]), random_rows(size[0], kind[0])[0]
    for rows in ROWS:
        check_residual(x[:rows], weight, numbers, residual[:rows], norm)


def check_residual(
    x: Tensor, weight: PackedWeight, numbers: Tensor, residual: Tensor, norm: Tensor
) -> None:
    """What a product leaves on the residual, and what the next one reads of it."""
    rows = slice(0, MOST_ROWS)
    found, wanted = residual.clone(), residual[rows].clone()
    left = few_rows_onto(x, weight, found, norm, 1e-5)
    wanted_left = few_rows_onto(x[rows], numbers, wanted, norm, 1e-5)
    assert torch.equal(found[rows], wanted)
    assert torch.equal(left.x[rows], wanted_left.x)
    assert left.squares is not None
    assert wanted_left.squares is not None
    assert torch.equal(left.squares[:, rows], wanted_left.squares)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "inputs", "group"), PRODUCTS)
def test_gated_products_have_the_bits_of_decoded_weights(
    outputs: int, inputs: int, group: int, bits: Bits
) -> None:
    weight = random_weight(outputs, inputs, group, bits, torch.bfloat16, torch.bfloat16)
    numbers, x = weight.numbers(), random_rows(inputs, torch.bfloat16)
    bias = random_rows(outputs, torch.bfloat16)[0]
    squares = torch.rand(4, PACKED_ROWS, device="cuda") * inputs

    def source(rows: int) -> Scaled:
        return Scaled(x[:rows], squares[:, :rows].contiguous(), 1e-5)

    for gates in GATES:
        few = few_rows(source(MOST_ROWS), numbers, bias, gates)
        for rows in ROWS:
            found = few_rows(source(rows), weight, bias, gates)
            assert torch.equal(found[:MOST_ROWS], few[:rows]), (gates, rows)

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

ROWS = (1, 2, 5, 16, 17, 32, 33, 64, 65, 100, 128, 129, 200, 256, 257, 384, 512)
PRODUCTS = [(4096, 4096, 128), (1536, 8960, 128), (960, 576, 64), (200, 544, 32)]
"""Outputs, inputs and a group's inputs."""
FILLING = (28672, 4096, 64)
"""With several programs on each multiprocessor, which wait for each other."""


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
EVERY.append((FILLING, KINDS[0], 4))


def in_parts(x: Tensor, numbers: Tensor) -> Tensor:
    """Products of plain weights, ours."""
    return torch.cat([few_rows_alone(part, numbers) for part in x.split(MOST_ROWS)])


@pytest.mark.parametrize(("size", "kind", "bits"), EVERY)
def test_weights_are_decoded(size: Size, kind: Kind, bits: Bits) -> None:
    weight = random_weight(*size, bits, *kind)
    found, wanted = decoded(weight), weight.numbers()
    assert int((found != wanted).sum()) == 0


@pytest.mark.parametrize(("size", "kind", "bits"), EVERY)
def test_products_have_the_bits_of_decoded_weights(size: Size, kind: Kind, bits: Bits) -> None:
    weight = random_weight(*size, bits, *kind)
    numbers, x = weight.numbers(), random_rows(size[1], kind[0])
    few, many = in_parts(x, numbers), few_rows_alone(x, weight)
    wrong = {}
    for rows in ROWS:
        found = few_rows_alone(x[:rows], weight)
        with Numerics.INVARIANT.library(rows):
            product = torch.mm(x[:rows], numbers.t())
        differ = found != few[:rows], found != product, found != many[:rows]
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
    found, wanted = residual.clone(), residual.clone()
    left = few_rows_onto(x, weight, found, norm, 1e-5)
    parts = [
        few_rows_onto(some, numbers, part, norm, 1e-5)
        for some, part in zip(x.split(MOST_ROWS), wanted.split(MOST_ROWS), strict=True)
    ]
    assert torch.equal(found, wanted)
    assert torch.equal(left.x, torch.cat([part.x for part in parts]))
    assert torch.equal(squares_of(left), torch.cat([squares_of(part) for part in parts], dim=1))


def squares_of(scaled: Scaled) -> Tensor:
    assert scaled.squares is not None
    return scaled.squares


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [*PRODUCTS, FILLING])
def test_gated_products_have_the_bits_of_decoded_weights(
    outputs: int, inputs: int, group: int, bits: Bits
) -> None:
    weight = random_weight(outputs, inputs, group, bits, torch.bfloat16, torch.bfloat16)
    numbers, x = weight.numbers(), random_rows(inputs, torch.bfloat16)
    bias = random_rows(outputs, torch.bfloat16)[0]
    squares = torch.rand(4, PACKED_ROWS, device="cuda") * inputs

    def source(first: int, last: int) -> Scaled:
        return Scaled(x[first:last], squares[:, first:last].contiguous(), 1e-5)

    for gates in GATES:
        starts = range(0, PACKED_ROWS, MOST_ROWS)
        parts = [source(start, start + MOST_ROWS) for start in starts]
        few = torch.cat([few_rows(part, numbers, bias, gates) for part in parts])
        for rows in ROWS:
            found = few_rows(source(0, rows), weight, bias, gates)
            assert torch.equal(found, few[:rows]), (gates, rows)

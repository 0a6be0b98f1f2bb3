"""Weights, keys and values as integer codes.

A product multiplies a weight's codes by those of rows, group by group of inputs:

    x @ weight.T = sum over groups of (sum of codes' products) * (output's scale) * (row's scale)
                                      + (row's scale * sum of its codes) * (output's offset)

A group's sums are sums of integers, exact in any order, then rounded to float32; groups are added
in order. So a row's result does not depend on the other rows, on tiles or on threads. Compiled code
(kernels/cpu/integer_product.py) gives the same bits.

int8 changes rows and weights before they are encoded, so that codes of one byte lose little. The
product stays the same:

    balance    each input of the weight is divided by about its size, and of a row multiplied by it
    rotation   each block of inputs is multiplied by a Hadamard matrix, which spreads a row's few
               large numbers over the block

A head's key or value has one scale, stored behind its codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels import SCALE_BYTES

MOST = 127.0
MOST_OF_TWO_BYTES = 127.0 * 256
"""The largest code of two bytes, each of which is an int8 code."""

LEAST_PEAK = 1e-30
"""Gives rows of zeros a scale too."""

Bits = Literal[4, 8]


class Scheme(NamedTuple):
    """How weights of some bits, and the rows that they multiply, are encoded."""

    group: int  # inputs that share a scale; the last group may be smaller
    row_bytes: int  # bytes of a row's code
    most_of_row: float  # a row's largest code
    has_offsets: bool  # a group of an output has an offset, too
    rotated: int  # inputs of a block that is rotated; 1: none is


GROUP = 32
SCHEMES: dict[Bits, Scheme] = {
    4: Scheme(GROUP, 2, MOST_OF_TWO_BYTES, has_offsets=True, rotated=1),
    8: Scheme(128, 1, MOST, has_offsets=False, rotated=64),
}
"""Larger groups bring int8 near the quality gates; smaller ones move sums out of a CPU's integer
units more often. int4 is not rotated: a model that was published in 4 bits keeps its numbers."""

_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Parts of the range of a group's numbers that int4 tries as its own range."""

POWERS = (-126, 127)
"""The powers of two that are normal numbers in float32."""

OUTPUTS_AT_ONCE = 64
"""Outputs widened to float64 by one torch operation: few enough for caches."""

GROUPS_AT_ONCE = 32_768
"""Groups quantized by one torch operation: enough to amortize its cost, few enough for caches."""


class IntegerWeight(NamedTuple):
    """A weight as codes, for products in `dtype`."""

    codes: Tensor  # [outputs, inputs], int8; those of int4 are from -8 to 7
    scales: Tensor  # [outputs, groups], float32
    offsets: Tensor  # [outputs, groups], float32; [outputs, 0] if the scheme has none
    bits: Bits
    dtype: torch.dtype
    balance: Tensor | None = None  # [inputs], float32: powers of two that multiply rows

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def changed(self, change: Callable[[Tensor], Tensor]) -> IntegerWeight:
        """Applies `change` to each tensor."""
        codes, scales, offsets = map(change, (self.codes, self.scales, self.offsets))
        return self._replace(codes=codes, scales=scales, offsets=offsets)


def quantize_to_int8(weight: Tensor) -> IntegerWeight:
    """weight [outputs, inputs]"""
    scheme, balance = SCHEMES[8], _sizes(weight)
    rotated = rotate(weight.float() / balance, scheme.rotated)
    rotated /= _block(weight.shape[1], scheme.rotated)
    parts = [_quantize(some, MOST) for some in torch.split(rotated, scheme.group, dim=1)]
    codes = torch.cat([codes for codes, _ in parts], dim=1).to(torch.int8)
    scales = torch.stack([scales for _, scales in parts], dim=1)
    return IntegerWeight(codes, scales, scales[:, :0], 8, weight.dtype, balance)


def _sizes(weight: Tensor) -> Tensor:
    """The root mean square of each input's numbers, rounded to a power of two. Squares and sums are
    in float64, where none is too large or too small."""
    squares = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
    for some in torch.split(weight, OUTPUTS_AT_ONCE):
        squares += some.double().square().sum(dim=0) / len(weight)
    powers = squares.log2().div(2).round().clamp(*POWERS)
    return torch.where(squares > 0, powers.exp2(), 1.0).float()


def quantize_to_int4(weight: Tensor) -> IntegerWeight:
    """weight [outputs, inputs]"""
    groups = _grouped(weight.float(), GROUP)
    some = torch.split(groups.reshape(-1, GROUP), GROUPS_AT_ONCE)
    parts = [_int4_codes(each.t()) for each in some]
    codes = torch.cat([part.codes.t() for part in parts])
    scales, offsets = (
        torch.cat(each).view(groups.shape[:2])
        for each in ([part.scales for part in parts], [part.offsets for part in parts])
    )
    codes = codes.to(torch.int8).view(len(weight), -1)[:, : weight.shape[1]]
    return IntegerWeight(codes.contiguous(), scales, offsets, 4, weight.dtype)


class _Int4Codes(NamedTuple):
    codes: Tensor  # [GROUP, groups]
    scales: Tensor  # [groups]
    offsets: Tensor  # [groups]


def _int4_codes(numbers: Tensor) -> _Int4Codes:
    """numbers [GROUP, groups]. Tries several ranges per group and keeps the one with the smallest
    error: clipping the largest number may help all others."""
    numbers = numbers.contiguous()
    ranges = numbers.amin(dim=0), numbers.amax(dim=0)
    mean = _sum(numbers) / GROUP
    differences = numbers - mean
    shares, gain = torch.zeros_like(mean), mean - torch.inf
    for share in _SHARES:
        other = _fit(_in_range(numbers, *ranges, share), differences).gain
        shares = torch.where(other > gain, share, shares)
        gain = torch.maximum(gain, other)
    codes = _in_range(numbers, *ranges, shares)
    fit = _fit(codes, differences)
    return _Int4Codes(codes.to(torch.int8), fit.scales, mean - fit.scales * fit.code_mean)


class _Fit(NamedTuple):
    """The least-squares line from a group's codes to its numbers."""

    scales: Tensor  # [groups]
    code_mean: Tensor  # [groups]
    gain: Tensor  # [groups], by how much the line lowers the sum of squared differences


def _fit(codes: Tensor, differences: Tensor) -> _Fit:
    """codes and differences from the group's mean, both [GROUP, groups]."""
    total, squares = _sum(codes), _sum(codes.square())
    spread = squares - total * total / GROUP
    together = _sum(codes * differences)
    scales = together.div_(spread).masked_fill_(spread == 0, 0.0)
    return _Fit(scales, total / GROUP, scales.square() * spread)


def _sum(numbers: Tensor) -> Tensor:
    """[GROUP, groups] -> [groups], in the same order on every CPU."""
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = numbers[:half] + numbers[half:]
    return numbers[0]


def _in_range(numbers: Tensor, least: Tensor, most: Tensor, share: Tensor | float) -> Tensor:
    """Codes within `share` of the range of a group's numbers."""
    reach = (most - least) * (share / 2)
    low, per_step = (least + most) / 2 - reach, 7.5 / reach.clamp(min=LEAST_PEAK)
    return (numbers - low).mul_(per_step).round_().clamp_(0, 15).sub_(8)


def integer_product(x: Tensor, weight: IntegerWeight) -> Tensor:
    """x [rows, inputs] -> [rows, outputs], float32, not rounded to x's type."""
    scheme = SCHEMES[weight.bits]
    x = x.float() if weight.balance is None else x.float() * weight.balance
    groups = torch.split(rotate(x, scheme.rotated), scheme.group, dim=1)
    codes_of_groups = torch.split(weight.codes, scheme.group, dim=1)
    total = torch.zeros(len(x), len(weight.codes))
    for group, (numbers, weights) in enumerate(zip(groups, codes_of_groups, strict=True)):
        codes, row_scales = _quantize(numbers, scheme.most_of_row)
        row_scales = row_scales.unsqueeze(1)
        sums = torch.mm(codes.double(), weights.double().t())  # exact
        total += sums.float() * weight.scales[:, group] * row_scales
        if scheme.has_offsets:
            total += codes.sum(dim=1, keepdim=True) * row_scales * weight.offsets[:, group]
    return total


def rotate(x: Tensor, most: int) -> Tensor:
    """x [..., size], each block of up to `most` numbers times a Hadamard matrix of 1 and -1: sums
    and differences of numbers 1 apart, then of these 2 apart, and so on. Compiled code
    (kernels/cpu/integer_codes.py) gives the same bits."""
    block, distance = _block(x.shape[-1], most), 1
    now = x.reshape(-1, block).t().contiguous()  # torch is fast in long rows
    after = torch.empty_like(now)
    while distance < block:
        low, high = now.view(-1, 2, distance, now.shape[1]).unbind(1)
        total, difference = after.view(-1, 2, distance, now.shape[1]).unbind(1)
        torch.add(low, high, out=total)
        torch.sub(low, high, out=difference)
        now, after, distance = after, now, distance * 2
    return now.t().reshape(x.shape)


def _block(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides `size`."""
    return min(most, size & -size)


def head_codes(heads: Tensor) -> Tensor:
    """heads [..., head_dim] -> [..., head_dim + SCALE_BYTES], int8. Compiled code
    (kernels/cpu/rotation.py) gives the same bits."""
    codes, scales = _quantize(heads.float(), MOST)
    return torch.cat((codes.to(torch.int8), scales.unsqueeze(-1).view(torch.int8)), dim=-1)


def head_numbers(codes: Tensor) -> Tensor:
    """Decodes what `head_codes` returned -> [..., head_dim], float32."""
    scales = codes[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return codes[..., :-SCALE_BYTES] * scales


def _quantize(x: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """x [..., size] -> its codes, of the same shape, and scales [...]."""
    peaks = x.abs().amax(dim=-1).clamp(min=LEAST_PEAK)
    # torch divides a number by a tensor in two steps, each rounded.
    factors = torch.full_like(peaks, most) / peaks
    return (x * factors.unsqueeze(-1)).round(), peaks / most


def _grouped(rows: Tensor, group: int) -> Tensor:
    """[rows, size] -> [rows, groups, group]; the last group is padded with zeros."""
    return functional.pad(rows, (0, -rows.shape[1] % group)).unfold(1, group, group)

"""Weights, keys and values as integer codes.

A product multiplies weights, with a scale and an offset for each group of inputs, by rows in
int16, with one scale each.

    x @ weight.T = row's scale * sum over groups of
                   (sum of codes' products) * (output's scale)
                   + (sum of the row's codes) * (output's offset)

A group's sums are sums of integers, exact in any order, then rounded to float32; groups are added
in order. So a row's result does not depend on the other rows, on tiles or on threads. Compiled code
(kernels/cpu/integer_product.py) gives the same bits.

Rows in int8 would be twice as fast to multiply, but would lose more accuracy than weights do, even
with a scale for each 32 inputs.

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
MOST_OF_ROW = 127.0 * 256
"""The largest code of a row: its upper and its lower byte are each an int8 code."""

LEAST_PEAK = 1e-30
"""Gives rows of zeros a scale too."""

Bits = Literal[4, 8]

GROUP = 32
GROUPS: dict[Bits, int] = {4: GROUP, 8: 256}
"""Inputs that share a scale and offset; a weight's last group may be smaller. Larger groups bring
int8 near the quality gates; smaller ones move sums out of a CPU's integer units more often. Sums
over up to 512 inputs fit into 32 bits, and sums of a row's codes into float32."""

_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Parts of the range of a group's numbers that int4 tries as its own range."""

GROUPS_AT_ONCE = 32_768
"""Groups quantized by one torch operation: enough to amortize its cost, few enough for caches."""


class IntegerWeight(NamedTuple):
    """A weight as codes, for products in `dtype`."""

    codes: Tensor  # [outputs, inputs], int8; those of int4 are from -8 to 7
    scales: Tensor  # [outputs, groups], float32
    offsets: Tensor  # [outputs, groups], float32
    bits: Bits
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def halves(self) -> list[IntegerWeight]:
        """Splits the outputs in two."""
        return [
            self.changed(lambda each: each.chunk(2)[0]),
            self.changed(lambda each: each.chunk(2)[1]),
        ]

    def changed(self, change: Callable[[Tensor], Tensor]) -> IntegerWeight:
        """Applies `change` to each tensor."""
        codes, scales, offsets = map(change, (self.codes, self.scales, self.offsets))
        return IntegerWeight(codes, scales, offsets, self.bits, self.dtype)


def quantize_to_int8(weight: Tensor) -> IntegerWeight:
    """weight [outputs, inputs]"""
    parts = [_int8_codes(some) for some in torch.split(weight.float(), GROUPS[8], dim=1)]
    codes, scales, offsets = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    return IntegerWeight(codes, scales, offsets, 8, weight.dtype)


def _int8_codes(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and offset of a group [outputs, inputs]. Its smallest and largest number get the
    outermost codes. Without an offset the loss is a tenth larger."""
    least, most = numbers.aminmax(dim=1, keepdim=True)
    scales = (most - least).clamp_(min=LEAST_PEAK) / 255
    codes = ((numbers - least) / scales).round_().sub_(128)
    return codes.to(torch.int8), scales, least + 128 * scales


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
    codes, scales = _quantize(x.float(), MOST_OF_ROW)
    total, size = torch.zeros(len(x), len(weight.codes)), GROUPS[weight.bits]
    for group, factors in enumerate(weight.scales.t()):
        part = slice(group * size, (group + 1) * size)
        sums = torch.mm(codes[:, part].double(), weight.codes[:, part].double().t())  # exact
        total += sums.float() * factors
        total += codes[:, part].sum(dim=1, keepdim=True) * weight.offsets[:, group]
    return total * scales.unsqueeze(1)


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

"""Numbers as integer codes: weights, keys and values.

Products are of weights, which have a scale for each 32 inputs, in int4 an offset too, and rows in
int16, which have one scale each.

    x @ weight.T = row's scale * sum over groups of
                   (sum of codes' products) * (output's scale)
                   + (sum of the row's codes) * (output's offset), of int4

A group's sums are of integers, exact in any order, then rounded to float32; groups are added in
order. So a row's result does not depend on the other rows, on tiles or on threads. Compiled code
(kernels/cpu/integer_product.py) gives the same bits.

Rows in int8 would be twice as fast to multiply, but lose more than weights do, even with a scale
for each 32 inputs.

A key or value of one head has one scale, which is behind its codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels import SCALE_BYTES

GROUP = 32
MOST = 127.0
MOST_OF_ROW = 127.0 * 256
"""So that its upper byte is a code of int8, and its lower byte another."""

LEAST_PEAK = 1e-30
"""Zeros have a scale too."""

Bits = Literal[4, 8]

_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Of the range of a group's numbers, for int4."""


class IntegerWeight(NamedTuple):
    """A weight as codes, for products in `dtype`."""

    codes: Tensor  # [outputs, inputs], int8; those of int4 are from -8 to 7
    scales: Tensor  # [outputs, groups], float32
    offsets: Tensor | None  # of int4: [outputs, groups], float32
    dtype: torch.dtype

    @property
    def bits(self) -> Bits:
        return 8 if self.offsets is None else 4

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def halves(self) -> list[IntegerWeight]:
        """Of the outputs."""
        return [
            self.changed(lambda each: each.chunk(2)[0]),
            self.changed(lambda each: each.chunk(2)[1]),
        ]

    def changed(self, change: Callable[[Tensor], Tensor]) -> IntegerWeight:
        """With each tensor changed."""
        offsets = None if self.offsets is None else change(self.offsets)
        return IntegerWeight(change(self.codes), change(self.scales), offsets, self.dtype)


def quantize_to_int8(weight: Tensor) -> IntegerWeight:
    """weight [outputs, inputs]"""
    return _weight(weight, *_quantize(_grouped(weight.float()), MOST))


def quantize_to_int4(weight: Tensor) -> IntegerWeight:
    """weight [outputs, inputs]. Of several ranges of numbers a group gets the one that loses least:
    the greatest may well be cut if all others gain by it."""
    groups = _grouped(weight.float())
    best = _int4_codes(groups, _SHARES[0])
    for share in _SHARES[1:]:
        other = _int4_codes(groups, share)
        better = other.loss < best.loss
        best = _Int4Codes(*(torch.where(better, *each) for each in zip(other, best, strict=True)))
    return _weight(weight, best.codes, best.scales.squeeze(-1), best.offsets.squeeze(-1))


class _Int4Codes(NamedTuple):
    codes: Tensor  # [outputs, groups, GROUP]
    scales: Tensor  # [outputs, groups, 1], as the others
    offsets: Tensor
    loss: Tensor


def _int4_codes(groups: Tensor, share: float) -> _Int4Codes:
    """Codes for that share of the range of a group's numbers, and the scale and offset that fit
    them best."""
    least, most = groups.aminmax(dim=-1, keepdim=True)
    middle, reach = (least + most) / 2, (most - least) / 2 * share
    steps = (reach / 7.5).clamp(min=LEAST_PEAK)
    codes = ((groups - (middle - reach)) / steps).round().clamp(0, 15) - 8
    mean, code_mean = groups.mean(dim=-1, keepdim=True), codes.mean(dim=-1, keepdim=True)
    spread = (codes - code_mean).square().sum(dim=-1, keepdim=True)
    together = ((codes - code_mean) * (groups - mean)).sum(dim=-1, keepdim=True)
    scales = together / spread.clamp(min=LEAST_PEAK)
    offsets = mean - scales * code_mean
    loss = (groups - codes * scales - offsets).square().sum(dim=-1, keepdim=True)
    return _Int4Codes(codes, scales, offsets, loss)


def _weight(
    weight: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor | None = None
) -> IntegerWeight:
    """With the codes of groups."""
    codes = codes.to(torch.int8).flatten(1)[:, : weight.shape[1]]
    return IntegerWeight(codes.contiguous(), scales, offsets, weight.dtype)


def integer_product(x: Tensor, weight: IntegerWeight) -> Tensor:
    """x [rows, inputs] -> [rows, outputs], float32, without rounding to x's type."""
    codes, scales = _quantize(x.float(), MOST_OF_ROW)
    total = torch.zeros(len(x), len(weight.codes))
    for group, factors in enumerate(weight.scales.t()):
        part = slice(group * GROUP, (group + 1) * GROUP)
        sums = torch.mm(codes[:, part].double(), weight.codes[:, part].double().t())  # exact
        total += sums.float() * factors
        if weight.offsets is not None:
            total += codes[:, part].sum(dim=1, keepdim=True) * weight.offsets[:, group]
    return total * scales.unsqueeze(1)


def head_codes(heads: Tensor) -> Tensor:
    """heads [..., head_dim] -> [..., head_dim + SCALE_BYTES], int8. Compiled code
    (kernels/cpu/rotation.py) gives the same bits."""
    codes, scales = _quantize(heads.float(), MOST)
    return torch.cat((codes.to(torch.int8), scales.unsqueeze(-1).view(torch.int8)), dim=-1)


def head_numbers(codes: Tensor) -> Tensor:
    """What `head_codes` stand for, [..., head_dim], float32."""
    scales = codes[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return codes[..., :-SCALE_BYTES] * scales


def _quantize(x: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """x [..., size] -> its codes, of the same shape, and scales [...]."""
    peaks = x.abs().amax(dim=-1).clamp(min=LEAST_PEAK)
    # torch divides a number by a tensor in two steps, each rounded.
    factors = torch.full_like(peaks, most) / peaks
    return (x * factors.unsqueeze(-1)).round(), peaks / most


def _grouped(rows: Tensor) -> Tensor:
    """[rows, size] -> [rows, groups, GROUP]; the last group is filled up."""
    return functional.pad(rows, (0, -rows.shape[1] % GROUP)).unfold(1, GROUP, GROUP)

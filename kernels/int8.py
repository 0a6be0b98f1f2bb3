"""Products of int8 codes: weights and rows of x have a scale for each 64 inputs.

    x @ weight.T = sum over groups of (sum of codes' products) * (output's scale * row's scale)

A group's sum is of integers, exact in any order; groups are added in order, in float32. So a row's
result does not depend on the other rows, on tiles or on threads. Compiled code
(kernels/cpu/int8_product.py) gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 64
"""With one scale a row instead, outliers double the error of SmolLM2-135M's log probabilities."""

MOST = 127.0
LEAST_PEAK = 1e-30
"""Groups of zeros have a scale too."""


class Int8Weight(NamedTuple):
    """A weight as codes, for products in `dtype`."""

    codes: Tensor  # [outputs, inputs], int8
    scales: Tensor  # [outputs, groups], float32
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def halves(self) -> list[Int8Weight]:
        """Of the outputs."""
        parts = zip(self.codes.chunk(2), self.scales.chunk(2), strict=True)
        return [Int8Weight(codes, scales, self.dtype) for codes, scales in parts]


def quantize_weight(weight: Tensor) -> Int8Weight:
    """weight [outputs, inputs]"""
    return Int8Weight(*quantize_rows(weight), weight.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, size] -> its codes, of the same shape, and scales [rows, groups]."""
    wide = _grouped(x.float())
    peaks = wide.abs().amax(dim=2).clamp(min=LEAST_PEAK)
    # torch divides a number by a tensor in two steps, each rounded.
    factors = torch.full_like(peaks, MOST) / peaks
    codes = (wide * factors.unsqueeze(2)).round().to(torch.int8)
    return codes.flatten(1)[:, : x.shape[1]].contiguous(), peaks / MOST


def int8_product(x: Tensor, weight: Int8Weight) -> Tensor:
    """x [rows, inputs] -> [rows, outputs], float32, without rounding to x's type."""
    codes, scales = quantize_rows(x)
    total = torch.zeros(len(x), len(weight.codes))
    ours, theirs = _grouped(codes), _grouped(weight.codes)
    for group in range(scales.shape[1]):
        # float32 holds every sum of so few products.
        sums = torch.mm(ours[:, group].float(), theirs[:, group].float().t())
        total += sums * (weight.scales[:, group] * scales[:, group : group + 1])
    return total


def _grouped(rows: Tensor) -> Tensor:
    """[rows, size] -> [rows, groups, GROUP]; the last group is filled up."""
    return functional.pad(rows, (0, -rows.shape[1] % GROUP)).unfold(1, GROUP, GROUP)

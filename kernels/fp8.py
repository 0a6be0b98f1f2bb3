"""Products of weights and rows in FP8 (e4m3), with a scale for each output and for each row.

    x @ weight.T = (sum of codes' products) * output's scale * row's scale

A row's codes depend on the row alone, so they are the same in batches of any size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
MOST = 448.0
"""The largest number in FP8."""

INVERSE_MOST = 1 / MOST
LEAST_PEAK = 1e-30
"""Gives rows of zeros a scale too."""


class Fp8Weight(NamedTuple):
    codes: Tensor  # [outputs, inputs], FP8
    scales: Tensor  # [outputs], float32

    def halves(self) -> list[Fp8Weight]:
        """Splits the outputs in two."""
        parts = zip(self.codes.chunk(2), self.scales.chunk(2), strict=True)
        return [Fp8Weight(codes, scales) for codes, scales in parts]

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


def quantize_to_fp8(x: Tensor) -> Fp8Weight:
    """Quantizes weights or rows: x [..., inputs] -> codes and scales."""
    x = x.float()
    peaks = x.abs().amax(dim=-1).clamp(min=LEAST_PEAK)
    # torch divides a number by a tensor in two steps, each rounded.
    factors = torch.full_like(peaks, MOST) / peaks
    return Fp8Weight((x * factors.unsqueeze(-1)).to(FP8), peaks * INVERSE_MOST)


def fp8_product(x: Tensor, weight: Fp8Weight) -> Tensor:
    """The product by definition: x [rows, inputs] -> [rows, outputs], float32, not rounded to x's
    type."""
    codes, scales = quantize_to_fp8(x)
    sums = torch.mm(codes.float(), weight.codes.float().t())
    return sums * weight.scales * scales.unsqueeze(1)

"""Weights as integer codes of 4 or 8 bits, packed as a GPU's tensor cores read them.

    weight[output, input] = round((code - zero) * scale), to the type of the products

The zero, an integer, and the scale belong to a group of 32, 64 or 128 neighbouring inputs. A
product has the same bits as one of the decoded weights: codes save memory and memory traffic, and
change no answer.

A word of 32 bits has the codes that one thread multiplies for one output: of each 16 inputs, inputs
2 q, 2 q + 1, 2 q + 8 and 2 q + 9; with 4 bits also those of the next 16. Words are ordered by
inputs, then outputs, then q. A group's zero is in the last bits of its scale, which are unused in
scales of 16 bits.

kernels/gpu/packed_tiles.py reads them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Bits = Literal[4, 8]

INPUTS = 32
"""Weights and groups have a multiple of this many inputs."""

GROUPS = (128, 64, 32)
MOST_GROUP: dict[Bits, int] = {4: 64, 8: 128}
"""Inputs per group when a weight is quantized: with 4 bits, groups of 128 lose twice as much."""

ZERO_BITS = 13
"""Bits of a scale's word that hold the zero: unused by scales in float16 and bfloat16."""

_ZEROS = (1 << ZERO_BITS) - 1
_NUMBERS_AT_ONCE = 1 << 24
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Parts of the range of a group's weights that 4 bits try as their own range."""


class PackedWeight(NamedTuple):
    """A weight [outputs, inputs] as codes, for products in `dtype`."""

    words: Tensor  # [inputs / 32 (4 bits) or / 16 (8 bits), outputs, 4], int32
    scales: Tensor  # [groups, outputs], int32: a float32 and the zero
    bits: Bits
    dtype: torch.dtype
    exact: bool  # whether `dtype` represents all scales

    @property
    def shape(self) -> torch.Size:
        blocks, outputs, _ = self.words.shape
        return torch.Size((outputs, blocks * 128 // self.bits))

    @property
    def group(self) -> int:
        return self.shape[1] // len(self.scales)

    @property
    def device(self) -> torch.device:
        return self.words.device

    def numbers(self) -> Tensor:
        """Decodes the weights, [outputs, inputs]."""
        zeros, scales = ((self.scales & _ZEROS).float(), _wide(self.scales & ~_ZEROS))
        spread = [each.t().repeat_interleave(self.group, dim=1) for each in (zeros, scales)]
        return ((_unpack(self.words, self.bits) - spread[0]) * spread[1]).to(self.dtype)


class Grid(NamedTuple):
    """The scales and zeros of a weight's codes: [outputs, inputs / INPUTS] each, float32."""

    scales: Tensor
    zeros: Tensor  # codes count from 0
    bits: Bits

    def to(self, device: str) -> Grid:
        return Grid(self.scales.to(device), self.zeros.to(device), self.bits)


def pack(weight: Tensor, grid: Grid) -> PackedWeight | None:
    """Packs a weight [outputs, inputs]; None if codes of this grid do not represent it exactly."""
    words = _scale_words(grid, weight.dtype)
    if words is None or not weight.shape[1] or weight.shape[1] % INPUTS:
        return None
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    step = max(1, _NUMBERS_AT_ONCE // weight.shape[1])
    for first in range(0, len(weight), step):
        some = slice(first, first + step)
        found = _codes(weight[some], Grid(grid.scales[some], grid.zeros[some], grid.bits))
        if found is None:
            return None
        codes[some] = found
    unused = _unused_bits(weight.dtype)
    exact = unused is None or not bool((words & ~_ZEROS & unused).any())
    return PackedWeight(_pack(codes, grid.bits), words, grid.bits, weight.dtype, exact)


def quantize_to_packed(weight: Tensor, bits: Bits) -> PackedWeight | None:
    """Rounds a weight [outputs, inputs] to codes; None if its inputs do not fill groups."""
    outputs, inputs = weight.shape
    sizes = (size for size in GROUPS if size <= MOST_GROUP[bits] and inputs % size == 0)
    group = next(sizes, None) if inputs else None
    if group is None:
        return None
    step = max(1, _NUMBERS_AT_ONCE // inputs)
    rounded, grids = torch.empty_like(weight), []
    for first in range(0, outputs, step):
        some = slice(first, first + step)
        numbers = weight[some].float().view(-1, group)
        scales, zeros = _fit4(numbers, weight.dtype) if bits == 4 else _fit8(numbers, weight.dtype)
        codes = _rounded(numbers, scales, zeros, bits)
        rounded[some] = ((codes - zeros) * scales).view(-1, inputs).to(weight.dtype)
        grids.append([each.view(-1, inputs // group) for each in (scales, zeros)])
    scales, zeros = (
        torch.cat(each).repeat_interleave(group // INPUTS, dim=1)
        for each in zip(*grids, strict=True)
    )
    return pack(rounded, Grid(scales, zeros, bits))


def _rounded(numbers: Tensor, scales: Tensor, zeros: Tensor, bits: Bits) -> Tensor:
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales)
    return (numbers * inverse).round_().add_(zeros).clamp_(0, 2**bits - 1)


def _fit8(numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Symmetric scales and zeros [groups, 1] for numbers [groups, group]."""
    scales = (numbers.abs().amax(dim=1, keepdim=True) / 127).to(_narrow(dtype)).float()
    return scales, torch.full_like(scales, 128.0)


def _fit4(numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As _fit8, but tries several ranges per group and keeps the one with the smallest error, with
    a scale refitted to it."""
    least = numbers.amin(dim=1, keepdim=True).clamp_(max=0.0)
    most = numbers.amax(dim=1, keepdim=True).clamp_(min=0.0)
    best = (torch.zeros_like(least), torch.zeros_like(least))
    lost = torch.full_like(least, torch.inf)
    for share in _SHARES:
        scales = ((most - least) * (share / 15)).to(_narrow(dtype)).float()
        zeros = torch.where(scales == 0, 0.0, -least * share / scales).round_().clamp_(0, 15)
        for _ in range(2):
            codes = _rounded(numbers, scales, zeros, 4).sub_(zeros)
            error = (codes * scales).sub_(numbers).square_().sum(dim=1, keepdim=True)
            better = error < lost
            best = torch.where(better, scales, best[0]), torch.where(better, zeros, best[1])
            lost = torch.minimum(lost, error)
            fitted = (codes * numbers).sum(dim=1, keepdim=True)
            fitted /= codes.square_().sum(dim=1, keepdim=True).clamp_(min=1.0)
            scales = fitted.to(_narrow(dtype)).float()
    return best


def _narrow(dtype: torch.dtype) -> torch.dtype:
    """The type of scales for products in `dtype`."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def _unused_bits(dtype: torch.dtype) -> int | None:
    """The bits of a float32 that numbers of `dtype` do not use. float16's exponents are checked
    elsewhere."""
    return {torch.bfloat16: 0xFFFF, torch.float16: _ZEROS}.get(dtype)


def _codes(weight: Tensor, grid: Grid) -> Tensor | None:
    """The weight's codes, uint8 [outputs, inputs]; None if they do not represent it exactly."""
    scales, zeros = (each.repeat_interleave(INPUTS, dim=1) for each in grid[:2])
    nearest = codes = _rounded(weight.float(), scales, zeros, grid.bits)
    wrong = torch.ones_like(weight, dtype=torch.bool)
    # A weight of 16 bits may be more than half a step from what it was rounded from.
    for step in (0, 1, -1):
        codes = torch.where(wrong, (nearest + step).clamp_(0, 2**grid.bits - 1), codes)
        wrong = ((codes - zeros) * scales).to(weight.dtype) != weight
        if not bool(wrong.any()):
            return codes.to(torch.uint8)
    return None


def _scale_words(grid: Grid, dtype: torch.dtype) -> Tensor | None:
    """Words [groups, outputs], with groups as large as possible; None if scales or zeros need more
    bits."""
    bits, zeros = grid.scales.view(torch.int32), grid.zeros.int()
    whole = bool((zeros == grid.zeros).all()) and int(zeros.min()) >= 0
    whole = whole and int(zeros.max()) <= 1 << grid.bits
    if not whole or bool((bits & _ZEROS).any()) or not bool(grid.scales.isfinite().all()):
        return None
    if dtype == torch.float16 and bool((grid.scales.half().float() != grid.scales).any()):
        return None
    words = (bits | zeros).t()
    while len(words) % 2 == 0 and INPUTS * grid.scales.shape[1] // len(words) < GROUPS[0]:
        if not torch.equal(words[::2], words[1::2]):
            break
        words = words[::2]
    return words.contiguous()


def _wide(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


class _Place(NamedTuple):
    """The place of a code in its word."""

    shift: int
    half: int  # first or second 16 inputs
    upper: int  # first or second 8 of these
    odd: int  # first or second of a pair

    def of(self, placed: Tensor) -> Tensor:
        """placed [..., halves, 2, 2] -> [...]"""
        return placed[..., self.half, self.upper, self.odd]


def _places(bits: Bits) -> list[_Place]:
    both = [(upper, odd) for upper in (0, 1) for odd in (0, 1)]
    if bits == 8:
        return [_Place(16 * upper + 8 * odd, 0, upper, odd) for upper, odd in both]
    every = [(half, *place) for half in (0, 1) for place in both]
    return [_Place(8 * half + 4 * upper + 16 * odd, half, upper, odd) for half, upper, odd in every]


def _by_place(codes: Tensor, bits: Bits) -> Tensor:
    """[outputs, inputs] -> [blocks, outputs, 4, halves, 2, 2], a view."""
    return codes.view(len(codes), -1, 8 // bits, 2, 4, 2).permute(1, 0, 4, 2, 3, 5)


def _pack(codes: Tensor, bits: Bits) -> Tensor:
    placed = _by_place(codes, bits)
    words = torch.zeros(placed.shape[:3], dtype=torch.int32, device=codes.device)
    for place in _places(bits):
        words |= place.of(placed).int() << place.shift
    return words


def _unpack(words: Tensor, bits: Bits) -> Tensor:
    blocks, outputs, _ = words.shape
    codes = torch.empty(outputs, blocks * 128 // bits, dtype=torch.uint8, device=words.device)
    placed = _by_place(codes, bits)
    for place in _places(bits):
        place.of(placed).copy_(words >> place.shift & (1 << bits) - 1)
    return codes

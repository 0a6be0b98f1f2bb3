"""Computes the rotations of queries and keys.

A head's dimensions are neighbouring pairs, so that a pair is one complex number and its
rotation one complex product. Checkpoints keep the two halves of a pair `dim / 2` apart;
`interleave_pairs` joins them when weights are loaded. Queries and keys are permuted alike, so
their products do not change. Dimensions that are not rotated are pairs with a frequency of 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.rope import Rope


class Rotation:
    """The rotations of one rope for heads of `head_dim`, whose first dimensions are rotated, or
    with `last` their last ones."""

    def __init__(
        self, rope: Rope, head_dim: int, device: torch.device | str = "cpu", *, last: bool = False
    ) -> None:
        still = head_dim // 2 - rope.dim // 2
        around = (still, 0) if last else (0, still)
        turned = torch.full((rope.dim // 2,), rope.attention_factor)
        self._frequencies = functional.pad(inverse_frequencies(rope), around).to(device)
        self._lengths = functional.pad(turned, around, value=1.0).to(device)

    def __call__(self, positions: Tensor) -> Tensor:
        """positions [T] -> [T, 1, head_dim / 2], complex64."""
        angles = torch.outer(positions.float(), self._frequencies).unsqueeze_(1)
        return torch.polar(self._lengths.expand_as(angles), angles)


def inverse_frequencies(rope: Rope) -> Tensor:
    """Radians per position, by rotated pair: [dim / 2], float32."""
    waves = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    if rope.kind == "linear":
        return 1.0 / waves / rope.factor
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.stretches) * waves)
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, 1.0 / waves)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, 1.0 / waves)
    return 1.0 / waves


def interleave_pairs(weight: Tensor, head_dim: int, dim: int) -> Tensor:
    """Rows [heads * head_dim, ...] of a projection, with each pair's rows side by side among the
    first `dim` of a head."""
    heads = weight.view(-1, head_dim, *weight.shape[1:])
    halves = heads[:, :dim].reshape(-1, 2, dim // 2, *weight.shape[1:])
    joined = halves.transpose(1, 2).flatten(1, 2)
    return torch.cat((joined, heads[:, dim:]), dim=1).view(weight.shape)


def separate_pairs(pairs: Tensor) -> Tensor:
    """[experts, ..., 2 * n], gates and ups in turn -> all gates, then all ups. In memory the result
    is ordered by outputs, as in the model, so that it is copied row by row."""
    rows = pairs.movedim(-1, 1)
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1).movedim(1, -1)


def _llama3_frequencies(rope: Rope, plain: Tensor) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between interpolated."""
    turns = rope.original_context * plain / (2 * math.pi)  # within the original context
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / rope.factor


def _yarn_frequencies(rope: Rope, plain: Tensor) -> Tensor:
    """Pairs that turn often keep their frequency; pairs that turn rarely are stretched."""
    low, high = _yarn_range(rope)
    pair = torch.arange(rope.dim // 2, dtype=torch.float32)
    stretched = ((pair - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - stretched) * plain + stretched * plain / rope.factor


def _yarn_range(rope: Rope) -> tuple[float, float]:
    """The pairs that turn beta_fast and beta_slow times within the original context."""

    def pair_that_turns(times: float) -> float:
        wavelength = rope.original_context / (times * 2 * math.pi)
        return rope.dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    return low, high if high != low else high + 0.001

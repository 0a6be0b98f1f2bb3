"""Rotary position embeddings: the angle by which each position turns each pair.

A head's dimensions are kept as neighbouring pairs, so that a pair is one
complex number and the rotation one complex product. Checkpoints keep the two
halves of a pair head_dim / 2 apart; `interleave_pairs` brings them together
when weights are loaded. Queries and keys are permuted alike, so their products
do not change.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.engine.architecture import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians a position, one for each pair: [head_dim / 2], float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain


def rotations(positions: Tensor, frequencies: Tensor, attention_factor: float) -> Tensor:
    """Unit rotations times `attention_factor`: positions [T] -> [T, 1, head_dim / 2], complex64."""
    angles = torch.outer(positions.float(), frequencies).unsqueeze_(1)
    return torch.polar(torch.full_like(angles, attention_factor), angles)


def interleave_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Rows [heads * head_dim, ...] of a projection, with each pair's two rows side by side."""
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between interpolated."""
    turns = rope.original_context * plain / (2 * math.pi)  # within the original context
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / rope.factor


def _yarn(rope: Rope, plain: Tensor, head_dim: int) -> Tensor:
    """Pairs that turn often keep their speed, pairs that turn rarely are stretched."""
    low, high = _yarn_range(rope, head_dim)
    pair = torch.arange(head_dim // 2, dtype=torch.float32)
    stretched = ((pair - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - stretched) * plain + stretched * plain / rope.factor


def _yarn_range(rope: Rope, head_dim: int) -> tuple[float, float]:
    """The pairs that turn beta_fast and beta_slow times within the original context."""

    def pair_that_turns(times: float) -> float:
        wavelength = rope.original_context / (times * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high != low else high + 0.001

"""Noise for sampling: one Gumbel value per (seed, position, token id), without state.

The token with the largest logit / temperature + noise is a draw from the softmax. Each token has
its own noise, so two distributions that differ a little give the same token, except with a
probability of about their distance: a changed last bit affects no other token.

`draw_key` mixes seed and position into 64 bits. A 32-bit finalizer hashes a token's id with
both halves; kernels/gpu/sampling.py computes the same integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK_64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15

# As int32, of which torch keeps the low 32 bits as it would of uint32.
TOKEN_FACTOR = 0x9E3779B9 - (1 << 32)
FIRST_FACTOR = 0x7FEB352D
SECOND_FACTOR = 0x846CA68B - (1 << 32)

UNIT = 2.0**-31
MOST_UNIFORM = 1.0 - 2.0**-24
"""Keeps the logarithm finite: the only token that filters leave must win with any noise."""


def draw_key(seed: int, position: int) -> int:
    """SplitMix64's output number `position` from the mixed seed, as a signed 64-bit number."""
    word = _mix(_mix(seed & MASK_64) + (position + 1) * GOLDEN_GAMMA & MASK_64)
    return word - (1 << 64) if word >> 63 else word


def add_noise(scores: Tensor, keys: Tensor) -> Tensor:
    """Adds each token's noise to scores [R, V], float32, in place. keys [R], int64.

    The noise is -log(E) of an exponential E.
    """
    low, high = keys.to(torch.int32)[:, None], (keys >> 32).to(torch.int32)[:, None]
    tokens = torch.arange(scores.shape[1], dtype=torch.int32, device=keys.device)
    words = tokens.mul_(TOKEN_FACTOR) + low
    _xor_shifted(words, 16).mul_(FIRST_FACTOR).bitwise_xor_(high)
    _xor_shifted(words, 15).mul_(SECOND_FACTOR)
    _xor_shifted(words, 16)
    negative = _shifted(words, 1).to(torch.float32).mul_(-UNIT).sub_(UNIT / 2)
    # log1p keeps small exponentials exact, and the winner's is small.
    exponentials = negative.clamp_(min=-MOST_UNIFORM).log1p_().neg_()
    return scores.sub_(exponentials.log_())


def _mix(word: int) -> int:
    """SplitMix64's finalizer: every bit of `word` affects every bit of the result."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK_64
    return word ^ (word >> 31)


def _xor_shifted(words: Tensor, count: int) -> Tensor:
    return words.bitwise_xor_(_shifted(words, count))


def _shifted(words: Tensor, count: int) -> Tensor:
    """A logical shift to the right: zeros come in from the left."""
    return (words >> count).bitwise_and_((1 << (32 - count)) - 1)

"""Keys and values as codes of four bits, two in a byte.

Each group of GROUP numbers of a head has a scale and a middle, with 16 evenly spaced steps around
the middle:

    number = (code - 7.5) * scale + middle

The lower half of a byte has the code of a number in the first half of a head, the upper half that
of the number half a head later. Behind the codes are the groups' scales and middles, in bfloat16,
in pairs.

One scale for a head, as in int8 (kernels/integers.py), loses too much with four bits. Compiled code
(kernels/cpu/half_byte_heads.py) and GPUs (kernels/gpu/head_codes.py) give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.head_sizes import GROUP, head_dim_of
from baton.kernels.integers import LEAST_PEAK

STEPS, CENTER = 15.0, 7.5
STEP = float(torch.tensor(1.0) / STEPS)
"""The part of a range that is one step; rounded to float32."""

LEAST_RANGE = LEAST_PEAK


def half_byte_codes(heads: Tensor) -> Tensor:
    """heads [..., head_dim] -> [..., stored bytes], uint8."""
    size, half = heads.shape[-1], heads.shape[-1] // 2
    numbers = heads.float()
    highest, lowest = (_group_peaks(numbers * sign) for sign in (1.0, -1.0))
    scales = ((highest + lowest).clamp(min=LEAST_RANGE) * STEP).bfloat16()
    middles = ((highest - lowest) * 0.5 + 0.0).bfloat16()  # never -0
    factors, centers = 1.0 / _spread(scales, size), _spread(middles, size)
    codes = ((numbers - centers) * factors + CENTER).round().clamp(0.0, STEPS)
    packed = (codes[..., :half] + 16.0 * codes[..., half:]).to(torch.uint8)
    pairs = torch.stack((scales, middles), dim=-1).flatten(-2)
    return torch.cat((packed, pairs.view(torch.uint8)), dim=-1)


def half_byte_numbers(stored: Tensor) -> Tensor:
    """Decodes what `half_byte_codes` returned -> [..., head_dim], float32."""
    size = head_dim_of(stored.shape[-1])
    packed, behind = stored[..., : size // 2], stored[..., size // 2 :]
    codes = torch.cat((packed & 15, packed >> 4), dim=-1)
    pairs = behind.contiguous().view(torch.bfloat16)
    scales, middles = (_spread(pairs[..., each::2], size) for each in (0, 1))
    return (codes - CENTER) * scales + middles


def _group_peaks(numbers: Tensor) -> Tensor:
    """The largest number of each group: [..., head_dim] -> [..., groups]."""
    filled = functional.pad(numbers, (0, -numbers.shape[-1] % GROUP), value=-torch.inf)
    return filled.reshape(*filled.shape[:-1], -1, GROUP).amax(dim=-1)


def _spread(groups: Tensor, size: int) -> Tensor:
    """[..., groups] -> [..., size], float32."""
    return groups.float().repeat_interleave(GROUP, dim=-1)[..., :size]

"""Weights in MXFP4: blocks of 32 numbers of four bits, each block with a power of two.

A checkpoint keeps such a tensor as two, of bytes:

    NAME_blocks  [experts, outputs, inputs / 32, 16]: two numbers each, that of the lower bits first
    NAME_scales  [experts, outputs, inputs / 32]: the exponents, plus 127

bfloat16 holds every such number exactly.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from baton.core.errors import InvalidCheckpoint

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_BYTES = 16
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = (*_POSITIVE, *(-number for number in _POSITIVE))


def dequantize(name: str, blocks: Tensor, scales: Tensor) -> Tensor:
    """The tensor `name` in bfloat16, [experts, inputs, outputs], as unquantized checkpoints keep
    it."""
    bytes_only = blocks.dtype == scales.dtype == torch.uint8
    if not bytes_only or blocks.dim() != 4 or blocks.shape != (*scales.shape, BLOCK_BYTES):
        raise InvalidCheckpoint(
            f"tensor {name} is not in MXFP4: blocks {list(blocks.shape)} of {blocks.dtype},"
            f" scales {list(scales.shape)} of {scales.dtype}"
        )
    # Both numbers of a byte are one entry, of 32 bits.
    pairs = torch.tensor([(low, high) for high, low in product(_NUMBERS, repeat=2)])
    table = pairs.bfloat16().view(torch.int32).flatten()
    powers = torch.pow(2.0, scales.float() - 127.0).bfloat16().unsqueeze(3)
    numbers = blocks.new_empty(*scales.shape, 2 * BLOCK_BYTES, dtype=torch.bfloat16)
    for expert, found in enumerate(blocks):
        entries = table.index_select(0, found.flatten().int())
        unscaled = entries.view(torch.bfloat16).view_as(numbers[expert])
        torch.mul(unscaled, powers[expert], out=numbers[expert])
    return numbers.flatten(2).transpose(1, 2)

"""Loads weights into the L2 cache before the kernel starts that reads them.

With few rows the kernels between two products leave memory idle, and so does the start of each.
A product that ends may have the weights of the next one loaded meanwhile.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_BYTES = 32 << 20
"""Of the L2 cache, which is larger."""

SHORT_BYTES = 24 << 20
"""Weights that load while attention decodes: larger ones keep it from its keys and values."""


def piece_for(ahead: Tensor | None, threads: int) -> int:
    """Bytes of `ahead` that each of all threads has loaded; 0: none are."""
    if ahead is None or not can_prefetch(ahead.device) or ahead.data_ptr() % 16:
        return 0
    return min(ahead.nbytes, MOST_BYTES) // threads // 16 * 16


@lru_cache
def can_prefetch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def prefetch(pointer, piece, thread):
    """Has a piece of memory loaded for each thread of each program; `thread`: their numbers."""
    number = tl.program_id(0).to(tl.int64) * thread.shape[0] + thread
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [pointer.to(tl.int64) + number * piece, thread * 0 + piece],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )

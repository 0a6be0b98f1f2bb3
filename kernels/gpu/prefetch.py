"""Loads weights into the L2 cache before the kernel that reads them starts.

With few rows, the kernels between two products leave memory idle, and so does the start of each
kernel. So a product that ends may prefetch the weights of the next one.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_BYTES = 32 << 20
"""Most bytes to prefetch; the L2 cache is larger."""

SHORT_BYTES = 24 << 20
"""Most bytes to prefetch while attention decodes: more would delay its keys and values."""

LINE = tl.constexpr(128)
"""Bytes of a line of the L2 cache."""


def piece_for(ahead: Tensor | None, threads: int) -> int:
    """Bytes of `ahead` that each thread prefetches; 0 if nothing is prefetched."""
    if ahead is None or not can_prefetch(ahead.device) or ahead.data_ptr() % 16:
        return 0
    return min(ahead.nbytes, MOST_BYTES) // threads // 16 * 16


@lru_cache
def can_prefetch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def prefetch(pointer, piece, program, thread):
    """Prefetches `piece` bytes per thread of each program; `thread` numbers a program's threads."""
    number = program.to(tl.int64) * thread.shape[0] + thread
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [pointer.to(tl.int64) + number * piece, thread * 0 + piece],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_lines(pointer, line, lines):
    """Prefetches one line per thread, of `lines` from `pointer` on: for pieces so small that the
    copy engine would be slower. Those of `line` beyond the last one prefetch that."""
    at = pointer.to(tl.int64) + LINE * tl.minimum(line, lines - 1).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )

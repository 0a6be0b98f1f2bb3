"""Keys and values as codes of a byte each, with one scale for a head of a token.

Codes are int8 or, in FP8, e4m3; their scale is in the bytes behind them (kernels/cache.py). A head
is encoded where it is stored, and decoded where it is read, to the dtype of the queries: a key has
the same bits in every kernel. kernels/integers.py is the twin of int8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels.fp8 import MOST as MOST_FP8
from baton.kernels.integers import LEAST_PEAK
from baton.kernels.integers import MOST as MOST_INT8

CODES = (torch.int8, torch.float8_e4m3fn)
"""What the memory of pages may hold instead of numbers."""


def is_coded(dtype: torch.dtype) -> bool:
    return dtype in CODES


@triton.jit
def encode(heads, CODE: tl.constexpr):
    """heads [n, size], float32, 0 beyond a head's numbers -> codes [n, size] and scales [n]."""
    most: tl.constexpr = INT8 if CODE.is_int() else FP8
    peaks = tl.maximum(tl.max(tl.abs(heads), axis=1), LEAST)
    codes = heads * tl.div_rn(most, peaks)[:, None]
    if CODE.is_int():
        codes = (codes + WHOLE) - WHOLE  # rounds to whole numbers
    return codes.to(CODE), tl.div_rn(peaks, most)


@triton.jit
def decode(codes, scales, DTYPE: tl.constexpr):
    """codes, with scales that broadcast to them -> what they stand for."""
    return (codes.to(tl.float32) * scales).to(DTYPE)


@triton.jit
def scales_at(codes_pointer):
    """Pointers to scales, of those to the bytes behind codes."""
    return codes_pointer.to(tl.pointer_type(tl.float32), bitcast=True)


INT8, FP8, LEAST = map(tl.constexpr, (MOST_INT8, MOST_FP8, LEAST_PEAK))
WHOLE = tl.constexpr(1.5 * 2**23)

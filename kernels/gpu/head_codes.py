"""Keys and values as codes: one byte each, with one scale per head of a token, or four bits each,
with a scale and a middle per group of numbers.

Codes are int8 or FP8 (e4m3); memory in uint8 has int4. Scales are in the bytes behind the codes
(kernels/cache.py). A head is encoded when it is stored and decoded to the dtype of the queries
when it is read, so a key has the same bits in every kernel. kernels/integers.py has int8 in torch,
kernels/half_bytes.py int4.

A byte of int4 has codes of both halves of a head, so a tile of bytes becomes two blocks of columns
(kernels/gpu/fixed_order.py): nothing is interleaved, and each byte is loaded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels import half_bytes, head_sizes
from baton.kernels.fp8 import MOST as MOST_FP8
from baton.kernels.gpu.fixed_order import columns_of
from baton.kernels.integers import LEAST_PEAK
from baton.kernels.integers import MOST as MOST_INT8

CODES = (torch.int8, torch.uint8, torch.float8_e4m3fn)
"""Dtypes of pages that hold codes."""


def is_coded(dtype: torch.dtype) -> bool:
    return dtype in CODES


def head_columns(head_dim: int, stored: torch.dtype) -> tuple[int, int]:
    """As fixed_order.columns_of, for stored heads: two blocks, the halves, for int4, and one for
    other codes."""
    size, rest = columns_of(head_dim)
    if stored == torch.uint8:
        half = head_sizes.gpu_half(head_dim)
        return 2 * half, half
    return size, 0 if is_coded(stored) else rest


@triton.jit
def encode_heads(heads, dim, DIM: tl.constexpr, CODE: tl.constexpr):
    """heads [n, size], float32, 0 beyond column DIM -> codes, their scales, and the decoded
    numbers, float32. dim [size] are the columns."""
    if tl.uint8 == CODE:
        codes, scales, numbers = _encode_halves(heads, dim, DIM)
    else:
        codes, scales = _encode(heads, CODE)
        numbers = decode(codes, scales[:, None], tl.float32)
    return codes, scales, numbers


@triton.jit
def store_codes(pointers, codes, scales, dim, kept, DIM: tl.constexpr):
    """Stores the codes and scales of encode_heads at pointers [n], for the heads `kept` [n]."""
    if in_halves(pointers.dtype):
        _store_halves(pointers, codes, scales, kept, DIM)
    else:
        inside = kept[:, None] & (dim < DIM)[None, :]
        tl.store(pointers[:, None] + dim[None, :], codes, mask=inside)
        tl.store(scales_at(pointers + DIM), scales, mask=kept)


@triton.jit
def _encode(heads, CODE: tl.constexpr):
    """heads [n, size] -> codes [n, size] and scales [n]."""
    most: tl.constexpr = INT8 if CODE.is_int() else FP8
    peaks = tl.maximum(tl.max(tl.abs(heads), axis=1), LEAST)
    codes = heads * tl.div_rn(most, peaks)[:, None]
    if CODE.is_int():
        codes = (codes + WHOLE) - WHOLE  # rounds to whole numbers
    return codes.to(CODE), tl.div_rn(peaks, most)


@triton.jit
def decode(codes, scales, DTYPE: tl.constexpr):
    """Decodes codes; scales broadcast to them."""
    return (codes.to(tl.float32) * scales).to(DTYPE)


@triton.jit
def scales_at(codes_pointer):
    """Turns pointers to the bytes behind codes into pointers to scales."""
    return codes_pointer.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.constexpr_function
def in_halves(pointer_type):
    """True if the memory holds int4."""
    return pointer_type.element_ty == tl.uint8


@triton.jit
def _encode_halves(heads, dim, DIM: tl.constexpr):
    """heads [n, size], float32, whose first DIM columns count -> bytes [n, size / 2], words
    [n, size / GROUP] with scales and middles, and the decoded numbers [n, size], float32. dim
    [size] are the columns. size is at least 2 * GROUP."""
    n: tl.constexpr = heads.shape[0]
    size: tl.constexpr = heads.shape[1]
    inside = (dim < DIM)[None, :]
    shape: tl.constexpr = (n, size // GROUP, GROUP)
    highest = tl.max(tl.reshape(tl.where(inside, heads, LOWEST), shape), axis=2)
    lowest = tl.max(tl.reshape(tl.where(inside, -heads, LOWEST), shape), axis=2)
    scale_bits = _upper_bits(tl.maximum(highest + lowest, LEAST) * STEP)
    middle_bits = _upper_bits((highest - lowest) * 0.5 + 0.0)  # never -0
    scales = scale_bits.to(tl.float32, bitcast=True)
    middles = middle_bits.to(tl.float32, bitcast=True)
    factors = tl.div_rn(1.0, scales)[:, :, None]
    steps = (tl.reshape(heads, shape) - middles[:, :, None]) * factors + CENTER
    steps = tl.minimum(tl.maximum((steps + WHOLE) - WHOLE, 0.0), STEPS)
    numbers = (steps - CENTER) * scales[:, :, None] + middles[:, :, None]
    codes = tl.where(inside, tl.reshape(steps, (n, size)), 0.0).to(tl.int32)
    halves = tl.permute(tl.reshape(codes, (n, 2, size // 2)), (0, 2, 1))
    low, high = tl.split(halves)
    words = (scale_bits >> 16) | middle_bits
    return (low | (high << 4)).to(tl.uint8), words, tl.reshape(numbers, (n, size))


@triton.jit
def _upper_bits(x):
    """x rounded to bfloat16, as the bits of a float32. Triton's interpreter would truncate it."""
    bits = x.to(tl.uint32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000


@triton.jit
def _store_halves(pointers, packed, words, kept, DIM: tl.constexpr):
    """Stores bytes and words of _encode_halves at pointers [n], for the heads `kept` [n]."""
    half: tl.constexpr = packed.shape[1]
    byte, group = tl.arange(0, half), tl.arange(0, words.shape[1])
    tl.store(pointers[:, None] + byte[None, :], packed, mask=kept[:, None])
    inside = kept[:, None] & (group < tl.cdiv(DIM, GROUP))[None, :]
    tl.store(words_at(pointers + half)[:, None] + group[None, :], words, mask=inside)


@triton.jit
def load_halves(pointers, there, HALF: tl.constexpr, DIM: tl.constexpr, DTYPE: tl.constexpr):
    """Loads both halves [n, HALF] of heads at pointers [n], decoded, for the heads `there` [n]."""
    byte = tl.arange(0, HALF)[None, :]
    packed = tl.load(pointers[:, None] + byte, mask=there[:, None], other=0)
    words = words_at(pointers + HALF)
    low = _decode_half(packed & 15, words, there, 0, DIM, DTYPE)
    high = _decode_half(packed >> 4, words, there, HALF, DIM, DTYPE)
    return low, high


@triton.jit
def _decode_half(
    codes, words_pointer, there, FIRST: tl.constexpr, DIM: tl.constexpr, DTYPE: tl.constexpr
):
    """Decodes codes [n, half] of numbers from FIRST on; 0 beyond DIM."""
    n: tl.constexpr = codes.shape[0]
    half: tl.constexpr = codes.shape[1]
    groups: tl.constexpr = half // GROUP
    group = tl.arange(0, groups)[None, :] + FIRST // GROUP
    mask = there[:, None] & (group < tl.cdiv(DIM, GROUP))
    words = tl.load(words_pointer[:, None] + group, mask=mask, other=0)
    scales = (words << 16).to(tl.float32, bitcast=True)[:, :, None]
    middles = (words & 0xFFFF0000).to(tl.float32, bitcast=True)[:, :, None]
    steps = tl.reshape(codes, (n, groups, GROUP)).to(tl.float32) - CENTER
    numbers = tl.reshape(steps * scales + middles, (n, half)).to(DTYPE)
    if FIRST + half > DIM:
        column = tl.arange(0, half)[None, :] + FIRST
        numbers = tl.where(column < DIM, numbers, 0.0)
    return numbers


@triton.jit
def words_at(codes_pointer):
    """Turns pointers to the bytes behind codes into pointers to groups' words."""
    return codes_pointer.to(tl.pointer_type(tl.uint32), bitcast=True)


GROUP = tl.constexpr(head_sizes.GROUP)
STEP, STEPS, CENTER = map(tl.constexpr, (half_bytes.STEP, half_bytes.STEPS, half_bytes.CENTER))
LOWEST = tl.constexpr(-1e38)
INT8, FP8, LEAST = map(tl.constexpr, (MOST_INT8, MOST_FP8, LEAST_PEAK))
WHOLE = tl.constexpr(1.5 * 2**23)

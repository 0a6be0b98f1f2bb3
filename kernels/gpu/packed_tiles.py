"""Tiles of a weight whose codes are packed (kernels/packed.py), decoded in registers.

A thread's words hold exactly the weights that it multiplies: nothing is moved between threads, and
decoded weights are not written to shared memory. With 4 bits, a pair of weights takes an
extraction, the subtraction of the zero and a multiplication by the scale. The subtraction is exact,
and the product is rounded once, as in float32: a scale with more digits than the products' type is
split into two numbers of that type, and a code times the second is exact too. With 8 bits,
subtraction and product are in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.fixed_order import COMPILED
from baton.kernels.packed import ZERO_BITS, PackedWeight

ZEROS = tl.constexpr((1 << ZERO_BITS) - 1)

TILE_OUTPUTS, TILE_INPUTS = 64, 256
"""Outputs and inputs per program that writes decoded weights."""


def decoded(weight: PackedWeight) -> Tensor:
    """Decodes a weight: [outputs, inputs]."""
    outputs, inputs = weight.shape
    out = torch.empty(outputs, inputs, dtype=weight.dtype, device=weight.device)
    grid = triton.cdiv(inputs, TILE_INPUTS), triton.cdiv(outputs, TILE_OUTPUTS)
    _decode[grid](
        weight.words,
        weight.scales,
        out,
        out.view(torch.int32),
        outputs,
        K=inputs,
        BITS=weight.bits,
        GROUP=weight.group,
        EXACT=weight.exact,
        BLOCK_N=TILE_OUTPUTS,
        BLOCK_K=TILE_INPUTS,
        EVEN=outputs % TILE_OUTPUTS == 0 and inputs % TILE_INPUTS == 0,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _decode(
    words_pointer,
    scales_pointer,
    out_pointer,
    pairs_pointer,
    outputs,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Two weights of 16 bits are written as one number."""
    dtype: tl.constexpr = out_pointer.dtype.element_ty
    each: tl.constexpr = 2 if COMPILED and dtype != tl.float32 else 1
    start = tl.program_id(0) * BLOCK_K
    first = tl.program_id(1) * BLOCK_N
    words, scales = _loaded(
        words_pointer, scales_pointer, start, first, outputs,
        K, BITS, GROUP, BLOCK_N, BLOCK_K, EVEN, False,
    )  # fmt: skip
    column = first + tl.arange(0, BLOCK_N)
    lane = start // each + tl.arange(0, BLOCK_K // each)
    at = column.to(tl.int64)[:, None] * (K // each) + lane[None, :]
    inside = (column < outputs)[:, None] & (lane < K // each)[None, :]
    if each == 2:
        tile = _pairs(words, scales, BITS, EXACT, dtype, BLOCK_N, BLOCK_K)
        pointer = pairs_pointer
    else:
        tile = numbers(words, scales, BITS, EXACT, dtype, BLOCK_N, BLOCK_K)
        pointer = out_pointer
    if EVEN:
        tl.store(pointer + at, tile)
    else:
        tl.store(pointer + at, tile, mask=inside)


@triton.jit
def _pairs(
    words,
    scales,
    BITS: tl.constexpr,
    EXACT: tl.constexpr,
    dtype: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As `numbers`, but returns two 16-bit weights as one 32-bit number: [BLOCK_N, BLOCK_K / 2]."""
    if BITS == 8:
        less, wide = _less_and_scale(scales, BITS, dtype)
        found = tl.inline_asm_elementwise(
            EIGHT_BIT_PAIRS_F16 if dtype == tl.float16 else EIGHT_BIT_PAIRS,
            "=r,=r,r,f,f",
            [words, less, wide],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        # [groups, blocks, outputs, threads, of 8]
        tile = tl.permute(tl.join(found[0], found[1]), (2, 0, 1, 4, 3))
    else:
        less, wide = _less_and_scale(scales, BITS, dtype)
        high = wide.to(dtype)
        found = tl.inline_asm_elementwise(
            FOUR_BIT_PAIRS_F16
            if dtype == tl.float16
            else (FOUR_BIT_PAIRS if EXACT else FOUR_BIT_PAIRS_AND_REST),
            "=r,=r,=r,=r,r,r,r,r",
            [words, less, _twice(high), _twice((wide - high.to(tl.float32)).to(dtype))],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        # The same, of 16.
        tile = tl.join(tl.join(found[0], found[1]), tl.join(found[2], found[3]))
        tile = tl.permute(tile, (2, 0, 1, 5, 4, 3))
    return tl.reshape(tile, (BLOCK_N, BLOCK_K // 2))


@triton.jit
def packed_tile(
    words_pointer,
    scales_pointer,
    start,
    first,
    outputs,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    dtype: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
):
    """Loads and decodes weights [BLOCK_N, BLOCK_K]: outputs from `first` on, of `outputs`, and
    inputs from `start` on. GATED: half of the tile are gates, the other half their ups, which
    follow all gates in memory. BLOCK_K is a multiple of GROUP or divides it."""
    words, scales = _loaded(
        words_pointer, scales_pointer, start, first, outputs,
        K, BITS, GROUP, BLOCK_N, BLOCK_K, EVEN, GATED,
    )  # fmt: skip
    return numbers(words, scales, BITS, EXACT, dtype, BLOCK_N, BLOCK_K)


@triton.jit
def _loaded(
    words_pointer,
    scales_pointer,
    start,
    first,
    outputs,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
):
    """Loads words [groups, blocks, BLOCK_N, 4] and scales [groups, BLOCK_N]."""
    block: tl.constexpr = 128 // BITS  # inputs
    groups: tl.constexpr = max(1, BLOCK_K // GROUP)
    blocks: tl.constexpr = BLOCK_K // groups // block
    half: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    stride = outputs * (2 if GATED else 1)
    # A block's words are contiguous, output after output, so threads load and share them.
    row, word = tl.arange(0, groups * blocks), tl.arange(0, BLOCK_N * 4)
    group, output = tl.arange(0, groups), tl.arange(0, BLOCK_N)
    in_words, in_outputs = first + word // 4 % half < outputs, first + output % half < outputs
    if GATED:
        word += word // (half * 4) * (outputs - half) * 4
        output += output // half * (outputs - half)
    words_at = words_pointer + (start // block) * (stride * 4) + first * 4
    words_at += row[:, None] * (stride * 4) + word[None, :]
    scales_at = scales_pointer + (start // GROUP) * stride + first
    scales_at += group[:, None] * stride + output[None, :]
    if EVEN:
        words = tl.load(words_at, eviction_policy="evict_first")
        scales = tl.load(scales_at)
    else:
        inside = (start + row * block < K)[:, None] & in_words[None, :]
        words = tl.load(words_at, mask=inside, other=0)
        inside = (start + group * GROUP < K)[:, None] & in_outputs[None, :]
        scales = tl.load(scales_at, mask=inside, other=0)
    return tl.reshape(words, (groups, blocks, BLOCK_N, 4)), scales


@triton.jit
def numbers(
    words,
    scales,
    BITS: tl.constexpr,
    EXACT: tl.constexpr,
    dtype: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """words [groups, blocks, BLOCK_N, 4] and scales [groups, BLOCK_N] -> [BLOCK_N, BLOCK_K]."""
    if BITS == 8:
        found = _eight_bits(words, scales, dtype)
        # [groups, blocks, outputs, threads, of 2, of 8]
        tile = tl.join(tl.join(found[0], found[1]), tl.join(found[2], found[3]))
        tile = tl.permute(tile, (2, 0, 1, 5, 3, 4))
    else:
        found = _four_bits(words, scales, EXACT, dtype)
        first = tl.join(tl.join(found[0], found[1]), tl.join(found[2], found[3]))
        second = tl.join(tl.join(found[4], found[5]), tl.join(found[6], found[7]))
        tile = tl.permute(tl.join(first, second), (2, 0, 1, 6, 5, 3, 4))  # the same, of 16
    tile = tl.reshape(tile, (BLOCK_N, BLOCK_K))
    if COMPILED and dtype != tl.float32:
        tile = tile.to(dtype, bitcast=True)
    return tile


@triton.jit
def _less_and_scale(scales, BITS: tl.constexpr, dtype: tl.constexpr):
    """The number to subtract from one with a code in its last bits, and the scale: both [groups, 1,
    BLOCK_N, 1]."""
    scales = scales[:, None, :, None]
    zeros, wide = scales & ZEROS, (scales & ~ZEROS).to(tl.float32, bitcast=True)
    if BITS == 8:  # 2^23 and the zero
        less = (zeros | 0x4B000000).to(tl.float32, bitcast=True)
    else:  # 128 or 1,024 and the zero, twice
        less = zeros | (zeros << 16) | (0x43004300 if dtype == tl.bfloat16 else 0x64006400)
    return less, wide


@triton.jit
def _exact_pairs(scales):
    """As _less_and_scale for 4 bits and bfloat16, each twice in a word, by one instruction each."""
    less = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0x43434343, 0x4040;",
        "=r,r", [scales], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    high = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x3232;", "=r,r", [scales], dtype=tl.int32, is_pure=True, pack=1
    )
    return less, high


@triton.jit
def _twice(number):
    """Repeats the bits of a 16-bit number in both halves of a word."""
    bits = number.to(tl.uint16, bitcast=True).to(tl.uint32)
    return (bits | (bits << 16)).to(tl.int32, bitcast=True)


@triton.jit
def _eight_bits(words, scales, dtype: tl.constexpr):
    """Decodes 8-bit codes into four tensors of weights, or of their bits."""
    if COMPILED and dtype != tl.float32:
        less, wide = _less_and_scale(scales, 8, dtype)
        found = tl.inline_asm_elementwise(
            EIGHT_BITS_F16 if dtype == tl.float16 else EIGHT_BITS,
            "=h,=h,=h,=h,r,f,f",
            [words, less, wide],
            dtype=(tl.uint16, tl.uint16, tl.uint16, tl.uint16),
            is_pure=True,
            pack=1,
        )
    else:
        found = (
            _written_out(words, scales, 0, 255, dtype),
            _written_out(words, scales, 8, 255, dtype),
            _written_out(words, scales, 16, 255, dtype),
            _written_out(words, scales, 24, 255, dtype),
        )
    return found


@triton.jit
def _four_bits(words, scales, EXACT: tl.constexpr, dtype: tl.constexpr):
    """Decodes 4-bit codes into eight tensors of weights, or of their bits."""
    if COMPILED and dtype != tl.float32:
        if EXACT and dtype == tl.bfloat16:
            less, high = _exact_pairs(scales[:, None, :, None])
            rest = less  # is not read
        else:
            less, wide = _less_and_scale(scales, 4, dtype)
            rest = _twice((wide - wide.to(dtype).to(tl.float32)).to(dtype))
            high = _twice(wide.to(dtype))
        found = tl.inline_asm_elementwise(
            FOUR_BITS_F16 if dtype == tl.float16 else (FOUR_BITS if EXACT else FOUR_BITS_AND_REST),
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r",
            [words, less, high, rest],
            dtype=(tl.uint16, tl.uint16, tl.uint16, tl.uint16,
                   tl.uint16, tl.uint16, tl.uint16, tl.uint16),
            is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        found = (
            _written_out(words, scales, 0, 15, dtype),
            _written_out(words, scales, 16, 15, dtype),
            _written_out(words, scales, 4, 15, dtype),
            _written_out(words, scales, 20, 15, dtype),
            _written_out(words, scales, 8, 15, dtype),
            _written_out(words, scales, 24, 15, dtype),
            _written_out(words, scales, 12, 15, dtype),
            _written_out(words, scales, 28, 15, dtype),
        )
    return found


@triton.jit
def _written_out(words, scales, SHIFT: tl.constexpr, MASK: tl.constexpr, dtype: tl.constexpr):
    scales = scales[:, None, :, None]
    zeros, wide = scales & ZEROS, (scales & ~ZEROS).to(tl.float32, bitcast=True)
    return ((((words >> SHIFT) & MASK) - zeros).to(tl.float32) * wide).to(dtype)


def _four_bit_instructions(base: str, decode: list[str], *, pairs: bool = False) -> tl.constexpr:
    """Assembly that decodes one word into eight weights or four pairs.

    For each pair of codes, p holds two numbers of `base` with the codes in their last bits, and
    `decode` turns p into weights. Operands are the results, then the word.
    """
    word = 4 if pairs else 8
    lines = [".reg .b32 p, t;"]
    for pair in range(4):
        lines.append(f"shr.u32 t, ${word}, {4 * pair};" if pair else f"mov.b32 t, ${word};")
        lines.append(f"lop3.b32 p, t, 0x000f000f, {base}, 0xea;")
        lines += [line.format(less=word + 1, scale=word + 2, rest=word + 3) for line in decode]
        lines.append(_result(pair, pairs))
    return tl.constexpr("{" + "\n".join(lines) + "}")


def _eight_bit_instructions(kind: str, *, pairs: bool = False) -> tl.constexpr:
    """As _four_bit_instructions, for half as many weights."""
    word = 2 if pairs else 4
    lines = [".reg .b32 p; .reg .f32 a, b;"]
    for pair in range(2):
        for at, number in enumerate("ab"):
            lines.append(f"prmt.b32 p, ${word}, 0x4b000000, {0x7440 + 2 * pair + at};")
            lines.append(f"mov.b32 {number}, p;")
            lines.append(f"sub.rn.f32 {number}, {number}, ${word + 1};")
            lines.append(f"mul.rn.f32 {number}, {number}, ${word + 2};")
        lines.append(f"cvt.rn.{kind}x2.f32 p, b, a;")
        lines.append(_result(pair, pairs))
    return tl.constexpr("{" + "\n".join(lines) + "}")


def _result(pair: int, pairs: bool) -> str:
    """Moves p to a result."""
    return f"mov.b32 ${pair}, p;" if pairs else f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, p;"


_EXACT = ["sub.rn.bf16x2 p, p, ${less};", "mul.rn.bf16x2 p, p, ${scale};"]
_REST = [_EXACT[0], "mul.rn.bf16x2 t, p, ${rest};", "fma.rn.bf16x2 p, p, ${scale}, t;"]
_F16 = ["sub.rn.f16x2 p, p, ${less};", "mul.rn.f16x2 p, p, ${scale};"]

FOUR_BITS = _four_bit_instructions("0x43004300", _EXACT)
FOUR_BITS_AND_REST = _four_bit_instructions("0x43004300", _REST)
FOUR_BITS_F16 = _four_bit_instructions("0x64006400", _F16)
FOUR_BIT_PAIRS = _four_bit_instructions("0x43004300", _EXACT, pairs=True)
FOUR_BIT_PAIRS_AND_REST = _four_bit_instructions("0x43004300", _REST, pairs=True)
FOUR_BIT_PAIRS_F16 = _four_bit_instructions("0x64006400", _F16, pairs=True)
EIGHT_BITS = _eight_bit_instructions("bf16")
EIGHT_BITS_F16 = _eight_bit_instructions("f16")
EIGHT_BIT_PAIRS = _eight_bit_instructions("bf16", pairs=True)
EIGHT_BIT_PAIRS_F16 = _eight_bit_instructions("f16", pairs=True)

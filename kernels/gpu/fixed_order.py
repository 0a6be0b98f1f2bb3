"""Sums and attention whose bits do not depend on a kernel's tiles, warps or other rows.

`tl.sum` adds in an order that depends on how a tensor is spread over threads, and the compiler
fuses a product and a sum where it can. Both differ from kernel to kernel, so a row's last bits
would depend on the kernel that computes it. Here sums are exact, or trees over the columns
themselves; kernels are compiled with `enable_fp_fusion=False`, and a fused operation is an explicit
`fma`.

Attention cuts a context at multiples of SPLIT tokens. In a split, tile after tile is added to the
sums so far, which are scaled down when a higher score comes. Splits are merged in order. This is
the same in every kernel, however many programs share a context. A tile or split without a visible
token changes nothing. A head's sink, an additional score of a token without a value, comes before
the first split.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels.linear import SWIGLU_ALPHA, SWIGLU_LIMIT

TILE = 64
"""Tokens whose scores are computed together."""

FLOAT32_TILE = 16
"""The same in float32, whose products are unrolled code instead of tensor core instructions: tiles
of 64 tokens took minutes to compile."""

SPLIT = 128
"""Tokens whose sums one program adds up: a multiple of TILE. Longer splits need less merging,
shorter ones let more programs share one sequence."""

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
"""False in the interpreter, which has no inline assembly: the same is then computed in Triton."""

ALPHA, LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)


def tile_of(dtype: torch.dtype) -> int:
    return TILE if dtype.itemsize == 2 else FLOAT32_TILE


@triton.jit
def awaited(sums):
    """A product that is complete before it is read. Triton 3.6 adds the result of `tl.dot` to other
    numbers within the product, whose last bits then differ. And it waits for a product of packed
    weights only after the next tile was decoded, maybe into registers that the product still reads:
    from 64 rows on, wrong sums were observed."""
    if COMPILED:
        sums = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [sums], dtype=tl.float32, is_pure=False, pack=1
        )
    return sums


@triton.constexpr_function
def square_columns(size):
    """Columns per partial sum of squares, of a product with `size` outputs; a row's sum of squares
    is the sum of these."""
    return 32 if size < 4096 else 64


@triton.constexpr_function
def _halvings(size):
    return size.bit_length() - 1


@triton.jit
def exact_sum(x, AXIS: tl.constexpr, COUNT: tl.constexpr):
    """Sums the COUNT numbers of x along an axis. None may be negative; COUNT is a power of two, 4
    or more.

    Each number is split into a multiple of a coarse unit and a multiple of a fine unit. Sums of
    either are exact in float32, and so do not depend on their order.
    """
    bits = tl.max(x, axis=AXIS).to(tl.int32, bitcast=True)
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)  # of two; all numbers are below twice
    # Adding this rounds to multiples of power * COUNT / 2^23.
    coarse = tl.expand_dims(power * (1.5 * COUNT), AXIS)
    fine = tl.expand_dims(power * (1.5 * COUNT) * (COUNT / 2**23), AXIS)
    high = (x + coarse) - coarse
    low = ((x - high) + fine) - fine
    return tl.sum(high, axis=AXIS) + tl.sum(low, axis=AXIS)


@triton.jit
def square_sums(x, AXIS: tl.constexpr, COUNT: tl.constexpr):
    """Sums of squares of x, float32, along an axis with COUNT numbers."""
    squares = x * x
    return exact_sum(squares, AXIS, COUNT) if COUNT >= 4 else tl.sum(squares, axis=AXIS)


@triton.jit
def part_sums(parts, AXIS: tl.constexpr, COUNT: tl.constexpr):
    """Sums a row's parts along an axis with COUNT numbers, a power of two."""
    return exact_sum(parts, AXIS, COUNT) if COUNT >= 4 else tl.sum(parts, axis=AXIS)


@triton.jit
def squares_of_row(x, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """x [BLOCK], float32, a row of SIZE -> its sum of squares, added up in the parts that products
    leave."""
    part: tl.constexpr = min(BLOCK, square_columns(SIZE))
    parts = square_sums(tl.reshape(x, (BLOCK // part, part)), 1, part)
    return part_sums(parts, 0, BLOCK // part)


@triton.jit
def inverse_size(squares, epsilon, SIZE: tl.constexpr):
    """The factor of a root-mean-square norm over SIZE elements."""
    return tl.rsqrt(squares / SIZE + epsilon)


@triton.jit
def gate(gates, ups, ACTIVATION: tl.constexpr):
    """activation(gates) * ups: see kernels/linear.Activation. gelu is approximated:

    x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), with u = root(2 / pi) * (x + 0.044715 x^3)
    """
    if ACTIVATION == "clamped_swiglu":
        gates = tl.minimum(gates, LIMIT)
        ups = tl.maximum(tl.minimum(ups, LIMIT), -LIMIT) + 1.0
        exponent = gates * ALPHA
    elif ACTIVATION == "gelu_tanh":
        exponent = gates * (1.5957691216057308 + gates * gates * 0.07135481282989508)
    else:
        exponent = gates
    return gates / (1.0 + tl.exp(-exponent)) * ups


@triton.jit
def settle(product, size, bias, SCALED: tl.constexpr, BIAS: tl.constexpr):
    """Applies a row's size and the bias to a rounded product, in float32."""
    if SCALED:
        settled = tl.fma(product, size, bias) if BIAS else product * size
    else:
        settled = product + bias if BIAS else product
    return settled


@triton.jit
def thread_sums(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [ROWS, COLUMNS] -> [ROWS, 4], each thread's sum of a product's result in registers: a
    thread has pairs of neighbours, eight columns apart, and four threads share a row."""
    left, right = tl.split(tl.reshape(x, (ROWS, COLUMNS // 8, 4, 2)))
    x = tl.permute(left + right, (0, 2, 1))
    for level in tl.static_range(_halvings(COLUMNS // 8)):
        first, second = tl.split(tl.reshape(x, (ROWS, 4, COLUMNS // 8 >> (level + 1), 2)))
        x = first + second
    return tl.reshape(x, (ROWS, 4))


@triton.jit
def _row_sums(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x [ROWS, COLUMNS] -> [ROWS]: adds up four threads' sums, neighbours first."""
    left, right = tl.split(tl.reshape(thread_sums(x, ROWS, COLUMNS), (ROWS, 2, 2)))
    first, second = tl.split(left + right)
    return first + second


def columns_of(dim: int) -> tuple[int, int]:
    """The columns of a head, padded to a power of two, and those of a second block, or 0.

    There is a second block if two powers of two add up to `dim` (96 = 64 + 32); the first block is
    then half of the padded columns. Scores have the same bits either way: padding is zero.
    """
    size = max(16, triton.next_power_of_2(dim))
    rest = dim - size // 2
    return size, rest if 16 <= rest < size // 2 and rest & (rest - 1) == 0 else 0


@triton.jit
def column_blocks(BLOCK_D: tl.constexpr, REST: tl.constexpr):
    """The column numbers of a head's blocks."""
    if REST > 0:
        blocks = (tl.arange(0, BLOCK_D // 2), BLOCK_D // 2 + tl.arange(0, REST))
    else:
        blocks = (tl.arange(0, BLOCK_D),)  # type: ignore[assignment]
    return blocks


@triton.jit
def cut_columns(x, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, REST: tl.constexpr):
    """Splits x [ROWS, BLOCK_D] into its blocks of columns."""
    if REST > 0:
        first, second = _column_halves(x, ROWS, BLOCK_D)
        for level in tl.static_range(_halvings(BLOCK_D // 2 // REST)):
            second, _ = _column_halves(second, ROWS, BLOCK_D // 2 >> level)
        blocks = (first, second)
    else:
        blocks = (x,)  # type: ignore[assignment]
    return blocks


@triton.jit
def zero_sums(ROWS: tl.constexpr, BLOCK_D: tl.constexpr, REST: tl.constexpr):
    """Zeros for the sums of each block of columns."""
    if REST > 0:
        first = tl.zeros([ROWS, BLOCK_D // 2], dtype=tl.float32)
        sums = (first, tl.zeros([ROWS, REST], dtype=tl.float32))
    else:
        sums = (tl.zeros([ROWS, BLOCK_D], dtype=tl.float32),)  # type: ignore[assignment]
    return sums


@triton.jit
def _column_halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def attend(
    highest,
    total,
    sums,
    query,
    keys,
    values,
    seen,
    scale,
    bend,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Adds a tile to those before it in its split. For each block of columns: query [ROWS,
    columns], keys [columns, TOKENS], values [TOKENS, columns]. CAPPED: products are multiplied by
    `bend` and pass through tanh before the scale: tanh(x) = 1 - 2 / (1 + 2^(2 x log2 e)).
    """
    scores = tl.dot(query[0], keys[0], out_dtype=tl.float32, input_precision="ieee")
    for number in tl.static_range(1, len(query)):
        scores = tl.dot(query[number], keys[number], scores, input_precision="ieee")
    if CAPPED:
        scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * bend))
    highest, total, fade, weights = _weigh(highest, total, scores, seen, scale, ROWS, TOKENS)
    weights = weights.to(values[0].dtype)
    added = ()
    for number in tl.static_range(len(sums)):
        faded = sums[number] * fade[:, None]
        product = tl.dot(weights, values[number], faded, input_precision="ieee")
        added += (product,)  # type: ignore[assignment]
    return highest, total, added


@triton.jit
def add_tile(
    highest, total, sums, scores, values, seen, scale, ROWS: tl.constexpr, TOKENS: tl.constexpr
):
    """Adds a tile's scores [ROWS, TOKENS] and values [TOKENS, dim] to each row's highest score,
    normalizer [ROWS] and weighted sums [ROWS, dim].

    The first tile of a split starts with a highest score of minus infinity.
    """
    highest, total, fade, weights = _weigh(highest, total, scores, seen, scale, ROWS, TOKENS)
    sums = tl.dot(weights.to(values.dtype), values, sums * fade[:, None], input_precision="ieee")
    return highest, total, sums


@triton.jit
def _weigh(highest, total, scores, seen, scale, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Returns each row's highest score and normalizer including the tile, the factor for earlier
    sums, and the tile's weights [ROWS, TOKENS]."""
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, axis=1) * scale)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(tl.fma(scores, scale, -base[:, None]))
    fade = tl.exp2(highest - base)
    total = tl.fma(total, fade, _row_sums(weights, ROWS, TOKENS))
    return higher, total, fade, weights


@triton.jit
def fades(highest, split_highest):
    """The higher score, and the factors for the sums of either side."""
    higher = tl.maximum(highest, split_highest)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, tl.exp2(highest - base), tl.exp2(split_highest - base)


@triton.jit
def merge(highest, total, sums, split_highest, split_total, split_sums):
    """Adds the next split to those before it."""
    highest, fade, share = fades(highest, split_highest)
    total = tl.fma(total, fade, split_total * share)
    sums = tl.fma(sums, fade[:, None], split_sums * share[:, None])
    return highest, total, sums


@triton.jit
def merge_blocks(highest, total, sums, split_highest, split_total, split_sums):
    """The same for each block of columns."""
    higher, fade, share = fades(highest, split_highest)
    total = tl.fma(total, fade, split_total * share)
    merged = ()
    for number in tl.static_range(len(sums)):
        added = split_sums[number] * share[:, None]
        merged += (tl.fma(sums[number], fade[:, None], added),)  # type: ignore[assignment]
    return higher, total, merged

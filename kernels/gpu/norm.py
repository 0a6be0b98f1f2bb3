"""RMS norms before a layer's products: rows of the residual, scaled by a norm's weight.

A program reads one row, once. A product reads rows that are scaled by the norm's weight only; their
size, the inverse root of their mean square, is a factor of the whole product and is applied after
it. So a product's kernel can also produce such rows (`Scaled`) without seeing a whole row. In
float16, rows without their size could overflow, so they are normed before the product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.fixed_order import inverse_size, squares_of_row
from baton.kernels.gpu.fp8_rows import Fp8Rows, Fp8Scales, apply_scales, empty_rows, store_codes

FEW_ROWS = 256
"""Up to this many rows latency counts: more warps, one 16-byte load per thread."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """Rows of a residual, scaled by a norm's weight; also by their size if `squares` is None."""

    x: Tensor  # [M, K]
    squares: Tensor | None  # [parts, M], float32: each part's sum of squares of the residual
    epsilon: float
    scales: Tensor | None = None  # [M], float32, if x are FP8 codes

    @property
    def read(self) -> Tensor | Fp8Rows:
        """The rows as a product reads them."""
        return self.x if self.scales is None else Fp8Rows(self.x, self.scales)

    def rows(self, chosen: slice | Tensor) -> Scaled:
        squares = None if self.squares is None else self.squares[:, chosen]
        scales = None if self.scales is None else self.scales[chosen]
        return Scaled(self.x[chosen], squares, self.epsilon, scales)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight: [T, H] -> [T, H]."""
    return _launch(x, weight, epsilon, normed=True).x


def scale_rows(
    residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    parts: Tensor | None = None,
    after: Tensor | None = None,
    *,
    part_scales: Fp8Scales | None = None,
    codes: bool = False,
) -> Scaled:
    """residual [T, H] += the sum of parts [n, T, H]. Returns the residual scaled by weight [H], or
    as it is without one.

    A single part may be normed with weight `after` [H] first, or multiplied by `part_scales`.
    `codes` asks for FP8 codes.
    """
    normed = residual.dtype is torch.float16
    changes = after, part_scales
    return _launch(residual, weight, epsilon, parts, *changes, normed=normed, codes=codes)


def embed(
    tokens: Tensor,
    embedding: Tensor,
    weight: Tensor | None,
    epsilon: float,
    scale: float = 1.0,
) -> tuple[Tensor, Scaled]:
    """The rows of embedding [vocabulary, H] for tokens [T], times `scale`; and the same scaled by
    weight [H], if given."""
    residual = embedding.new_empty(len(tokens), embedding.shape[1])
    normed, gathered = residual.dtype is torch.float16, (tokens, embedding)
    return residual, _launch(
        residual, weight, epsilon, gathered=gathered, scale=scale, normed=normed
    )


def _launch(
    residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    parts: Tensor | None = None,
    after: Tensor | None = None,
    part_scales: Fp8Scales | None = None,
    *,
    gathered: tuple[Tensor, Tensor] | None = None,
    scale: float = 1.0,
    normed: bool,
    codes: bool = False,
) -> Scaled:
    rows, size = residual.shape
    block = triton.next_power_of_2(size)
    out, squares, scales = residual, None, None
    if weight is not None:
        if codes:
            out, scales = empty_rows(rows, size, residual.device)
        else:
            out = torch.empty(rows, size, dtype=residual.dtype, device=residual.device)
        squares = None if normed else residual.new_empty(1, rows, dtype=torch.float32)
    tokens, embedding = gathered or (residual, residual)
    _rows[(rows,)](
        residual,
        tokens,
        embedding,
        residual if parts is None else parts,
        *(part_scales or (residual, residual)),
        residual if weight is None else weight,
        residual if after is None else after,
        out,
        out if squares is None else squares,
        out if scales is None else scales,
        epsilon,
        scale,
        residual.stride(0),
        rows * size,
        PARTS=0 if parts is None else len(parts),
        RESCALED=part_scales is not None,
        GATHERS=gathered is not None,
        ENLARGED=scale != 1.0,
        AFTER=after is not None,
        WEIGHED=weight is not None,
        NORMED=normed,
        CODES=scales is not None,
        SIZE=size,
        BLOCK=block,
        num_warps=_warps(rows, block),
        enable_fp_fusion=False,
    )
    return Scaled(out, squares, epsilon, scales)


def _warps(rows: int, block: int) -> int:
    elements_a_warp = 256 if rows <= FEW_ROWS else 512
    return min(max(block // elements_a_warp, 1), 16)


@triton.jit(do_not_specialize=["part_stride"], do_not_specialize_on_alignment=["tokens_pointer"])
def _rows(
    residual_pointer,
    tokens_pointer,
    embedding_pointer,
    parts_pointer,
    part_rows_pointer,
    part_outputs_pointer,
    weight_pointer,
    after_pointer,
    out_pointer,
    squares_pointer,
    scales_pointer,
    epsilon,
    scale,
    residual_stride,
    part_stride,
    PARTS: tl.constexpr,
    RESCALED: tl.constexpr,
    GATHERS: tl.constexpr,
    ENLARGED: tl.constexpr,
    AFTER: tl.constexpr,
    WEIGHED: tl.constexpr,
    NORMED: tl.constexpr,
    CODES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    residual_at = residual_pointer + row * residual_stride + column
    if GATHERS:
        token = tl.load(tokens_pointer + row).to(tl.int64)
        source = tl.load(embedding_pointer + token * SIZE + column, mask=inside, other=0.0)
        if ENLARGED:
            source = (source.to(tl.float32) * scale).to(source.dtype)
        tl.store(residual_at, source, mask=inside)
    else:
        source = tl.load(residual_at, mask=inside, other=0.0)
    x = source.to(tl.float32)
    for part in tl.static_range(PARTS):
        part_at = parts_pointer + part * part_stride + row * SIZE + column
        part_x = tl.load(part_at, mask=inside, other=0.0)
        if RESCALED:
            outputs = tl.load(part_outputs_pointer + column, mask=inside, other=0.0)
            part_x = apply_scales(part_x, tl.load(part_rows_pointer + row), outputs)
        part_x = part_x.to(tl.float32)
        if AFTER:
            after = tl.load(after_pointer + column, mask=inside, other=0.0).to(tl.float32)
            size = inverse_size(squares_of_row(part_x, SIZE, BLOCK), epsilon, SIZE)
            part_x = part_x * size * after
            part_x = part_x.to(source.dtype).to(tl.float32)
        x += part_x
    dtype = residual_pointer.dtype.element_ty
    if PARTS > 0:
        tl.store(residual_at, x.to(dtype), mask=inside)
        x = x.to(dtype).to(tl.float32)
    if WEIGHED:
        weight = tl.load(weight_pointer + column, mask=inside, other=0.0).to(tl.float32)
        squares = squares_of_row(x, SIZE, BLOCK)
        if NORMED:
            x = x * inverse_size(squares, epsilon, SIZE)
        else:
            tl.store(squares_pointer + row, squares)
        scaled = (x * weight).to(dtype)
        if CODES:
            scaled = scaled.to(tl.float32)
            store_codes(out_pointer, scales_pointer, scaled, row, column, SIZE)
        else:
            tl.store(out_pointer + row * SIZE + column, scaled, mask=inside)

"""The operations between the products of latent attention (kernels/latent.py).

A product leaves for each token its queries, or what they are computed from, then its latent. The
latent is normed, rotated and stored into its page. Queries are rotated, and `head_products` maps
their plain part to the length of a latent's normed part.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.fixed_order import inverse_size, settle, squares_of_row
from baton.kernels.gpu.head_products import head_products, multiply, tiling_of
from baton.kernels.gpu.rotary import Projected, load_pairs, load_turn, prepare_heads

FEW_ROWS = 32
"""Up to this many rows each head has its own program."""

ROWS_AT_ONCE = 8
"""Up to this many rows one kernel does all: a second launch would cost more than its work."""


Stores = Tensor | tuple[Tensor, Tensor]
"""See absorb_and_store."""


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The sizes of a layer, named as in kernels/latent.py; `scale` is the factor of scores."""

    heads: int
    rank: int
    rotated: int
    plain: int
    value: int
    scale: float
    epsilon: float

    @property
    def latent(self) -> int:
        """Numbers of a token's latent."""
        return self.rank + self.rotated

    @property
    def query(self) -> int:
        return self.plain + self.rotated


def norm_queries(projected: Projected, norm: Tensor, epsilon: float) -> Tensor:
    """Settles and norms the first len(norm) columns: [T, len(norm)]."""
    qkv, squares, size = projected.qkv, projected.squares, len(norm)
    out = qkv.new_empty(len(qkv), size)
    block = triton.next_power_of_2(size)
    _norm_queries[(len(qkv),)](
        qkv,
        qkv if squares is None else squares,
        norm,
        out,
        projected.source.epsilon if projected.source else 0.0,
        epsilon,
        qkv.stride(0),
        SIZE=size,
        BLOCK=block,
        INPUTS=projected.source.x.shape[1] if projected.source else 1,
        SCALED=squares is not None,
        num_warps=min(max(block // 256, 1), 8),
        enable_fp_fusion=False,
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["squares_pointer"])
def _norm_queries(
    qkv_pointer,
    squares_pointer,
    norm_pointer,
    out_pointer,
    epsilon,
    norm_epsilon,
    stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    INPUTS: tl.constexpr,
    SCALED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    size = 1.0
    if SCALED:
        size = inverse_size(tl.load(squares_pointer + row), epsilon, INPUTS)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    raw = tl.load(qkv_pointer + row * stride + column, mask=inside, other=0.0)
    normed = _normed(raw, size, norm_pointer, norm_epsilon, column, SIZE, BLOCK, SCALED)
    tl.store(out_pointer + row * SIZE + column, normed, mask=inside)


@triton.jit
def _normed(
    raw,
    size,
    norm_pointer,
    epsilon,
    column,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Settles, norms and rounds raw [BLOCK]."""
    x = settle(raw.to(tl.float32), size, 0.0, SCALED, False).to(raw.dtype).to(tl.float32)
    weight = tl.load(norm_pointer + column, mask=column < SIZE, other=0.0).to(tl.float32)
    return (x * inverse_size(squares_of_row(x, SIZE, BLOCK), epsilon, SIZE) * weight).to(raw.dtype)


def absorb_and_store(
    projected: Projected,
    cos_sin: Tensor,
    positions: Tensor,
    stores: Stores,
    kv_layer: Tensor,
    sizes: LatentSizes,
    key_norm: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """Stores latents in kv_layer [page, 1, token, 1, rank + rotated]. Returns queries [T, heads,
    plain], and queries [T, heads, rank + rotated] that have absorbed weight [heads, rank, plain].

    stores [T] are page * page_size + offset, or negative if nothing is stored. Or they are rows [T]
    and a page table, in which the positions are looked up; negative positions are skipped. cos_sin
    [positions, rotated] holds a position's cosines, one per pair, then its sines.
    """
    query = projected.qkv.new_empty(len(projected.qkv), sizes.heads, sizes.latent)
    at_once = len(query) <= ROWS_AT_ONCE and projected.squares is None
    plain = rotate_and_store_latents(
        projected, cos_sin, positions, stores, kv_layer, sizes, key_norm, query,
        weight if at_once else None,
    )  # fmt: skip
    return plain, query if at_once else head_products(plain, weight, query)


def rotate_and_store_latents(
    projected: Projected,
    cos_sin: Tensor,
    positions: Tensor,
    stores: Stores,
    kv_layer: Tensor,
    sizes: LatentSizes,
    key_norm: Tensor,
    absorbed: Tensor,
    weight: Tensor | None = None,
) -> Tensor:
    """As absorb_and_store, but writes to absorbed [T, heads, rank + rotated] only the rotated part
    of queries, unless a weight is given. Returns the settled queries [T, heads, plain]."""
    qkv, squares = projected.qkv, projected.squares
    queries, scaled = projected.queries, squares is not None
    queries = qkv if queries is None else queries
    rows, table = (stores, cos_sin) if isinstance(stores, Tensor) else stores
    block_heads = 1 if len(qkv) <= FEW_ROWS else 8
    head_blocks = triton.cdiv(sizes.heads, block_heads)
    block_m, block_n, _, _ = tiling_of(ROWS_AT_ONCE, sizes.rank, sizes.plain)
    tiles = 0 if weight is None else triton.cdiv(sizes.rank, block_n)
    _rotate_and_store[(len(qkv), 1 + head_blocks + tiles * sizes.heads)](
        qkv,
        queries,
        qkv if squares is None else squares,
        cos_sin,
        positions,
        rows,
        table,
        kv_layer,
        key_norm,
        absorbed,
        absorbed if weight is None else weight,
        len(qkv),
        projected.source.epsilon if projected.source else 0.0,
        sizes.epsilon,
        qkv.stride(0),
        queries.stride(0),
        table.stride(0),
        kv_layer.stride(0),
        PAGE_SIZE=kv_layer.shape[2],
        HEADS=sizes.heads,
        PLAIN=sizes.plain,
        ROTATED=sizes.rotated,
        RANK=sizes.rank,
        KEPT=qkv.shape[1] - sizes.latent,
        INPUTS=projected.source.x.shape[1] if projected.source else 1,
        BLOCK_HEADS=block_heads,
        BLOCK_PLAIN=max(16, triton.next_power_of_2(sizes.plain)),
        BLOCK_ROTATED=triton.next_power_of_2(sizes.rotated),
        BLOCK_RANK=triton.next_power_of_2(sizes.rank),
        HEAD_BLOCKS=head_blocks,
        TILES=tiles,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        SCALED=scaled,
        QUERIES_SCALED=scaled and projected.queries is None,
        TABLED=not isinstance(stores, Tensor),
        num_warps=4,
        enable_fp_fusion=False,
    )
    by_head = queries[:, : sizes.heads * sizes.query].unflatten(1, (sizes.heads, sizes.query))
    return by_head[:, :, : sizes.plain]


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["squares_pointer", "positions_pointer", "rows_pointer"],
)
def _rotate_and_store(
    qkv_pointer,
    queries_pointer,
    squares_pointer,
    cos_sin_pointer,
    positions_pointer,
    rows_pointer,
    table_pointer,
    kv_pointer,
    norm_pointer,
    absorbed_pointer,
    weight_pointer,
    rows,
    epsilon,
    norm_epsilon,
    qkv_stride,
    queries_stride,
    table_stride,
    page_stride,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    ROTATED: tl.constexpr,
    RANK: tl.constexpr,
    KEPT: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr,
    BLOCK_ROTATED: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
    QUERIES_SCALED: tl.constexpr,
    TABLED: tl.constexpr,
):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if TILES > 0 and part > HEAD_BLOCKS:
        if token > 0:
            return  # The first token's programs multiply all rows.
        tile = part - HEAD_BLOCKS - 1
        of_head = tile // TILES
        multiply(
            queries_pointer + of_head * (PLAIN + ROTATED),
            weight_pointer + of_head * (RANK * PLAIN),
            absorbed_pointer + of_head * (RANK + ROTATED), 0, tile % TILES * BLOCK_N, rows,
            queries_stride, HEADS * (RANK + ROTATED), RANK, PLAIN, BLOCK_M, BLOCK_N, BLOCK_PLAIN,
        )  # fmt: skip
        return
    position = tl.load(positions_pointer + token)
    if position < 0:
        return
    size = 1.0
    if SCALED:
        size = inverse_size(tl.load(squares_pointer + token), epsilon, INPUTS)
    dim = tl.arange(0, BLOCK_ROTATED)
    turn = load_turn(cos_sin_pointer, position, dim, ROTATED)
    in_dim = (dim < ROTATED)[None, :]
    if part == 0:
        store = tl.load(rows_pointer + token).to(tl.int64)
        if TABLED:
            page = tl.load(table_pointer + store * table_stride + position // PAGE_SIZE)
            store = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        if store >= 0:
            kept = qkv_pointer + token * qkv_stride + KEPT
            spot = kv_pointer + store // PAGE_SIZE * page_stride
            spot += store % PAGE_SIZE * (RANK + ROTATED)
            column = tl.arange(0, BLOCK_RANK)
            raw = tl.load(kept + column, mask=column < RANK, other=0.0)
            normed = _normed(
                raw, size, norm_pointer, norm_epsilon, column, RANK, BLOCK_RANK, SCALED
            )
            tl.store(spot + column, normed, mask=column < RANK)
            turned, _ = prepare_heads(
                load_pairs(kept, RANK + dim[None, :], in_dim), size, (0.0, 0.0), (1.0, 1.0), turn,
                0.0, ROTATED, BLOCK_ROTATED, SCALED, False, False, True,
            )  # fmt: skip
            tl.store(spot + RANK + dim[None, :], turned, mask=in_dim)
    else:
        head = (part - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        mine = (head < HEADS)[:, None]
        query = queries_pointer + token * queries_stride
        at = head[:, None] * (PLAIN + ROTATED) + PLAIN + dim[None, :]
        turned, _ = prepare_heads(
            load_pairs(query, at, mine & in_dim), size, (0.0, 0.0), (1.0, 1.0), turn,
            0.0, ROTATED, BLOCK_ROTATED, QUERIES_SCALED, False, False, True,
        )  # fmt: skip
        to = absorbed_pointer + (token * HEADS + head[:, None]) * (RANK + ROTATED)
        tl.store(to + RANK + dim[None, :], turned, mask=mine & in_dim)
        if QUERIES_SCALED:
            plain = tl.arange(0, BLOCK_PLAIN)[None, :]
            plain_at = query + head[:, None] * (PLAIN + ROTATED) + plain
            raw = tl.load(plain_at, mask=mine & (plain < PLAIN), other=0.0)
            settled = settle(raw.to(tl.float32), size, 0.0, True, False).to(raw.dtype)
            tl.store(plain_at, settled, mask=mine & (plain < PLAIN))

"""The attention kernels against their references, which compute in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import kernel_reference as reference
import pytest
import torch
from kernel_checks import assert_close, types_for
from torch import Tensor

from baton.engine.gpu.prompt_attention import LongChunk, library_attention
from baton.kernels.attention import Scoring
from baton.kernels.gpu import fixed_order, splits
from baton.kernels.gpu.chunk_attention import BLOCK_QUERIES, chunk_attention, merge_attended
from baton.kernels.gpu.decode_attention import decode_attention
from baton.kernels.gpu.fixed_order import FLOAT32_TILE, TILE
from baton.kernels.gpu.norm import Scaled
from baton.kernels.gpu.rotary import HeadShape, Projected
from baton.kernels.gpu.splits import SplitWorkspace

LAYERS = 3


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    rotates: bool = True
    norms: bool = False
    late: bool = False  # sizes and biases are applied after the product
    cap: float | None = None
    sinks: bool = False

    def shape_on(self, device: torch.device) -> HeadShape:
        sinks = torch.linspace(-9.0, 9.0, self.heads, device=device) if self.sinks else None
        return HeadShape(
            self.heads,
            self.kv_heads,
            self.dim,
            self.window,
            self.rotates,
            epsilon=1e-5,
            scoring=Scoring(self.dim**-0.5, self.cap),
            sinks=sinks,
        )


class Pool:
    """Random pages, and sequences that own some of them in random order."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        heads: Heads,
        page_size: int,
        lengths: list[int],
    ) -> None:
        self.generator = torch.Generator().manual_seed(heads.dim + page_size + sum(lengths))
        self.device, self.dtype, self.heads = device, dtype, heads
        widest = max(-(-length // page_size) for length in lengths)
        pages = widest * len(lengths)
        self.kv = self.random(pages, LAYERS, 2, page_size, heads.kv_heads, heads.dim)
        order = torch.randperm(pages, generator=self.generator)
        self.table = order.view(len(lengths), widest).int().to(device)
        angles = torch.rand(max(lengths), heads.dim // 2, generator=self.generator) * 7
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def qkv(self, rows: int) -> Tensor:
        return self.random(rows, (self.heads.heads + 2 * self.heads.kv_heads) * self.heads.dim)

    def projected(self, rows: int) -> Projected:
        qkv = self.qkv(rows)
        if not self.heads.late:
            return Projected(qkv)
        squares = 20 * torch.rand(1, rows, generator=self.generator).to(self.device)
        source = Scaled(self.random(rows, 20), squares, 1e-5)
        return Projected(qkv, source, self.random(qkv.shape[1]))

    def ints(self, *values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def blank(self, rows: int) -> Tensor:
        width = self.heads.heads * self.heads.dim
        return torch.full((rows, width), math.nan, dtype=self.dtype, device=self.device)


@pytest.mark.parametrize(
    ("dim", "columns"),
    [
        (8, (16, 0)),
        (24, (32, 0)),
        (64, (64, 0)),
        (80, (128, 16)),
        (96, (128, 32)),
        (112, (128, 0)),
        (128, (128, 0)),
        (192, (256, 64)),
    ],
)
def test_a_head_has_a_second_block_where_two_powers_of_two_hold_it(
    dim: int, columns: tuple[int, int]
) -> None:
    assert fixed_order.columns_of(dim) == columns


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize(
    "heads",
    [
        Heads(4, 2, 64, late=True),
        Heads(3, 1, 80, window=40, norms=True),
        Heads(2, 2, 96, rotates=False),
        Heads(8, 1, 256, norms=True, late=True),
        Heads(6, 2, 8, window=7),
        Heads(4, 2, 64, window=40, cap=0.5),
        Heads(8, 2, 64, window=40, sinks=True, late=True),
        Heads(6, 1, 32, sinks=True),
    ],
    ids=str,
)
def test_decode_attention_matches_the_reference(
    device: torch.device, heads: Heads, page_size: int
) -> None:
    shape = heads.shape_on(device)
    for dtype in types_for(device, torch.float16, torch.bfloat16):
        pool = Pool(device, dtype, heads, page_size, [600, 1, 66, 9])
        rows, positions = pool.ints(2, 0, 1, 3), pool.ints(65, 599, 0, -1)
        norms = [pool.random(heads.dim) if heads.norms else None for _ in range(2)]
        projected, kv = pool.projected(4), pool.kv.clone()
        workspace = SplitWorkspace.make(4, 600, heads.heads, heads.kv_heads, heads.dim, device)
        found, wanted = pool.blank(4), pool.blank(4)
        for attend, memory, out in (
            (decode_attention, pool.kv, found),
            (reference.decode_attention, kv, wanted),
        ):
            attend(
                projected, pool.cos_sin, rows, positions, pool.table, memory[:, 1], shape,
                workspace, out, norms[0], norms[1],
            )  # fmt: skip
        assert_close(found[:3], wanted[:3])
        assert found[3].isnan().all(), "a row without a sequence is left alone"
        assert_close(pool.kv, kv)
        assert torch.equal(pool.kv[:, [0, 2]], kv[:, [0, 2]]), "another layer was written"


@pytest.mark.parametrize("window", [None, 200])
def test_any_number_of_programs_gives_the_same_bits(
    device: torch.device, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = Heads(8, 2, 64, window=window, sinks=True)
    found = []
    for programs in (1, 2, 4):
        monkeypatch.setattr(splits, "MOST_PROGRAMS", programs)
        pool = Pool(device, torch.float32, heads, 16, [600, 66])
        workspace = SplitWorkspace.make(2, 600, 8, 2, 64, device)
        out = pool.blank(2)
        decode_attention(
            pool.projected(2), pool.cos_sin, pool.ints(0, 1), pool.ints(599, 65), pool.table,
            pool.kv[:, 1], heads.shape_on(device), workspace, out,
        )  # fmt: skip
        found.append(out)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.fixture(params=[TILE, FLOAT32_TILE])
def tile(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 in the form of 16-bit types, which the interpreter lacks, and in its own."""
    if device.type == "cuda" and request.param != FLOAT32_TILE:
        pytest.skip("takes minutes to compile, and 16-bit types have it")
    monkeypatch.setattr(fixed_order, "FLOAT32_TILE", request.param)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize(
    ("heads", "page_size"),
    [
        (Heads(4, 2, 64), 16),
        (Heads(3, 1, 80, window=20), 5),
        (Heads(2, 2, 8), 3),
        (Heads(2, 1, 32, cap=0.5), 16),
        (Heads(4, 2, 64, sinks=True), 16),
        (Heads(3, 1, 32, window=9, sinks=True), 5),
        (Heads(1, 1, 256, window=90), 16),
    ],
    ids=str,
)
def test_chunk_attention_matches_the_reference(
    device: torch.device, heads: Heads, page_size: int
) -> None:
    starts, counts, shape = (100, 0), (70, 3), heads.shape_on(device)
    for dtype in types_for(device, torch.float16, torch.bfloat16):
        pool = Pool(device, dtype, heads, page_size, [170, 3])
        blocks, row = [(0, 0, 0, 0)], 0
        for slot, (start, count) in enumerate(zip(starts, counts, strict=True)):
            for offset in range(0, count, BLOCK_QUERIES):
                rows = min(BLOCK_QUERIES, count - offset)
                blocks.append((row + offset, start + offset, rows, slot))
            row += count
        qkv, found, wanted = pool.qkv(row + 1), pool.blank(row + 1), pool.blank(row + 1)
        layer = pool.kv[:, 1]
        chunk_attention(qkv, pool.ints(*blocks), pool.table, layer, shape, found)
        reference.chunk_attention(qkv, pool.ints(*blocks), pool.table, layer, shape, wanted)
        assert_close(found[:row], wanted[:row])
        assert found[row].isnan().all(), "a row of no block is left alone"


@pytest.mark.parametrize("start", [0, 512, 700, 1536])
def test_the_librarys_attention_of_a_long_chunk_matches_the_reference(
    device: torch.device, start: int
) -> None:
    heads, count = Heads(4, 2, 64), 600
    shape = heads.shape_on(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pool = Pool(device, dtype, heads, 16, [start + count, start + count])
    qkv, layer = pool.qkv(count + 3), pool.kv[:, 1]
    # The chunk's own keys and values are in their pages, as a step has put them there.
    tokens = torch.arange(start, start + count, device=device)
    pages, keys_values = pool.table[1, tokens // 16].long(), qkv[2 : 2 + count].view(count, 8, 64)
    layer[pages, 0, tokens % 16] = keys_values[:, 4:6]
    layer[pages, 1, tokens % 16] = keys_values[:, 6:]
    chunk = LongChunk(2, count, start, slot=1)
    found = library_attention(qkv, chunk, pool.table, layer, shape)
    wanted = pool.blank(count + 3)
    reference.chunk_attention(
        qkv, pool.ints((2, start, count, 1)), pool.table, layer, shape, wanted
    )
    assert_close(found, wanted[2 : 2 + count])


@pytest.mark.parametrize(("tokens", "dim"), [(1, 64), (37, 80), (48, 128)])
def test_merged_parts_of_a_context_match_the_reference(
    device: torch.device, tokens: int, dim: int
) -> None:
    for dtype in types_for(device, torch.float16, torch.bfloat16):
        rows = torch.randn(2, tokens, 3, dim, device=device, dtype=dtype)
        attended, earlier = rows.transpose(1, 2)[:, None]
        weight, earlier_weight = 9 * torch.randn(2, 1, 3, tokens, 1, device=device)
        wanted, wanted_weight = attended.clone(), weight.clone()
        reference.merge_attended(wanted, wanted_weight, earlier, earlier_weight)
        merge_attended(attended, weight, earlier, earlier_weight)
        assert_close(attended, wanted)
        assert_close(weight, wanted_weight)

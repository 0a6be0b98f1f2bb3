"""The kernels for latents against their references, which compute in float64."""

from __future__ import annotations

from pathlib import Path

import latent_reference as reference
import numpy as np
import pytest
import torch
from kernel_checks import assert_close, types_for
from pools import CUDA
from tiny_models import TINY_MODELS, save
from torch import Tensor

from baton.engine.architecture import read_architecture
from baton.engine.checkpoint import Checkpoint
from baton.engine.gpu.adapter_rows import arrange_rows
from baton.engine.gpu.batch import StepArrays
from baton.engine.gpu.latent_attention import LatentAttention
from baton.engine.gpu.prompt_attention import LongChunk
from baton.engine.weights import load_model
from baton.kernels.gpu.chunk_attention import BLOCK_QUERIES
from baton.kernels.gpu.expanded_attention import expanded_attention
from baton.kernels.gpu.head_products import head_products
from baton.kernels.gpu.latent_attention import (
    MOST_BYTES,
    chunk_latents,
    decode_latents,
    filling_heads,
)
from baton.kernels.gpu.latent_low_rank import LatentAdapters
from baton.kernels.gpu.latent_projection import (
    LatentSizes,
    absorb_and_store,
    norm_queries,
    rotate_and_store_latents,
)
from baton.kernels.gpu.low_rank import AdapterStack, SlotRows
from baton.kernels.gpu.norm import Scaled
from baton.kernels.gpu.rotary import Projected
from baton.kernels.gpu.splits import SplitWorkspace

SIZES = [
    LatentSizes(4, 32, 8, 16, 12, scale=0.2, epsilon=1e-6),
    LatentSizes(18, 40, 16, 24, 20, scale=0.15, epsilon=1e-6),
    # The interpreter pays by head.
    LatentSizes(16 if CUDA else 2, 512, 64, 128, 128, scale=0.07, epsilon=1e-6),
]
LAYERS = 2


def types_of(device: torch.device, sizes: LatentSizes) -> list[torch.dtype]:
    """Of which a tile fits on a GPU's chip."""
    known = types_for(device, torch.float16, torch.bfloat16)
    return known[1:] if device.type == "cuda" and 4 * sizes.latent > MOST_BYTES else known


class Pool:
    """Random pages of latents, and sequences that own some of them in random order."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        sizes: LatentSizes,
        page_size: int,
        lengths: list[int],
    ) -> None:
        self._generator = torch.Generator().manual_seed(sizes.rank + page_size)
        self._device, self._dtype = device, dtype
        widest = max(-(-length // page_size) for length in lengths)
        pages = widest * len(lengths)
        self.kv = self.random(pages, LAYERS, 1, page_size, 1, sizes.latent)
        order = torch.randperm(pages, generator=self._generator)
        self.table = order.view(len(lengths), widest).int().to(device)
        angles = torch.rand(max(lengths), sizes.rotated // 2, generator=self._generator) * 7
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device, self._dtype)

    def ints(self, *values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    def projected(self, rows: int, columns: int, *, late: bool) -> Projected:
        qkv = self.random(rows, columns)
        if not late:
            return Projected(qkv)
        squares = 20 * torch.rand(1, rows, generator=self._generator).to(self._device)
        return Projected(qkv, Scaled(self.random(rows, 20), squares, 1e-5))


@pytest.mark.parametrize("late", [True, False], ids=["late", "settled"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_latents_are_normed_rotated_and_stored(
    device: torch.device, sizes: LatentSizes, late: bool
) -> None:
    queries = sizes.heads * sizes.query
    for dtype in types_for(device, torch.float16, torch.bfloat16):
        for rows in (4, 40):
            pool = Pool(device, dtype, sizes, 5, [40, 40])
            made = pool.projected(rows, queries + sizes.latent, late=late)
            positions = torch.arange(rows, dtype=torch.int32, device=device)
            stores = torch.where(positions % 4 == 3, -1, positions * 2).int()
            norm, kv = pool.random(sizes.rank), pool.kv.clone()
            found, wanted = pool.random(2, rows, sizes.heads, sizes.latent)
            wanted_plain = reference.rotate_and_store_latents(
                made, pool.cos_sin, positions, stores, kv[:, 1], sizes, norm, wanted
            )
            found_plain = rotate_and_store_latents(
                made, pool.cos_sin, positions, stores, pool.kv[:, 1], sizes, norm, found
            )
            assert_close(found_plain, wanted_plain)
            assert_close(found[..., sizes.rank :], wanted[..., sizes.rank :])
            assert_close(pool.kv, kv)


def test_queries_of_a_rank_and_latents_placed_by_a_table(
    device: torch.device,
) -> None:
    sizes, rank = SIZES[0], 24
    pool = Pool(device, torch.float32, sizes, 5, [12, 12, 12])
    made = pool.projected(3, rank + sizes.latent, late=True)
    norm = pool.random(rank)
    assert_close(norm_queries(made, norm, 1e-6), reference.norm_queries(made, norm, 1e-6))
    made = Projected(made.qkv, made.source, queries=pool.random(3, sizes.heads * sizes.query))
    positions, slots = pool.ints(11, -1, 7), pool.ints(2, 0, 1)
    pages = [int(pool.table[2, 2]), int(pool.table[1, 1])]
    stores = pool.ints(pages[0] * 5 + 1, -1, pages[1] * 5 + 2)
    key_norm, kv = pool.random(sizes.rank), pool.kv.clone()
    found, wanted = pool.random(2, 3, sizes.heads, sizes.latent)
    known = positions.clamp(min=0)
    reference.rotate_and_store_latents(
        made, pool.cos_sin, known, stores, kv[:, 1], sizes, key_norm, wanted
    )
    rotate_and_store_latents(
        made, pool.cos_sin, positions, (slots, pool.table), pool.kv[:, 1], sizes, key_norm, found
    )
    assert_close(pool.kv, kv)
    assert_close(found[[0, 2], :, sizes.rank :], wanted[[0, 2], :, sizes.rank :])


@pytest.mark.parametrize("rows", [1, 20, 150])
def test_products_of_heads(device: torch.device, rows: int) -> None:
    for dtype in types_for(device, torch.float16, torch.bfloat16):
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, 3, 100, generator=generator).to(device, dtype)[..., :72]
        weight = torch.randn(3, 40, 72, generator=generator).to(device, dtype)
        out = torch.zeros(rows, 3, 50, dtype=dtype, device=device)
        wanted = torch.einsum("thk,hnk->thn", x.double(), weight.double())
        assert_close(head_products(x, weight, out)[..., :40], wanted)
        assert not out[..., 40:].any()


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention_of_single_tokens(
    device: torch.device, sizes: LatentSizes, page_size: int
) -> None:
    length = 600 if sizes.rank < 100 or device.type == "cuda" else 200
    for dtype in types_of(device, sizes):
        pool = Pool(device, dtype, sizes, page_size, [length, 1, 66, 9])
        rows, positions = pool.ints(2, 0, 1, 3), pool.ints(65, length - 1, 0, -1)
        query = pool.random(4, sizes.heads, sizes.latent)
        filling = filling_heads(sizes.heads)
        workspace = SplitWorkspace.make(4, length, sizes.heads, filling, sizes.rank, device)
        found, wanted = pool.random(2, 4, sizes.heads, sizes.rank)
        untouched = found[3].clone()
        decode_latents(query, rows, positions, pool.table, pool.kv[:, 1], sizes, workspace, found)
        blocks = torch.stack(
            (torch.arange(4, device=device), positions, (positions >= 0).int(), rows), dim=1
        )
        reference.chunk_latents(query, blocks, pool.table, pool.kv[:, 1], sizes, wanted)
        assert_close(found[:3], wanted[:3])
        assert torch.equal(found[3], untouched), "a row without a sequence is left alone"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention_of_chunks(device: torch.device, sizes: LatentSizes) -> None:
    page_size = 16 if sizes.rank == 512 else 5  # Hopper has a kernel for the former.
    for dtype in types_of(device, sizes):
        pool = Pool(device, dtype, sizes, page_size, [150, 3])
        pool.kv[pool.table[1, 0], :, :, 3:] = torch.nan  # what no token was stored in
        blocks, row = [(0, 0, 0, 0)], 0
        for slot, (start, count) in enumerate(((80, 70), (0, 3))):
            for offset in range(0, count, BLOCK_QUERIES):
                rows = min(BLOCK_QUERIES, count - offset)
                blocks.append((row + offset, start + offset, rows, slot))
            row += count
        query = pool.random(row + 1, sizes.heads, sizes.latent)
        found, wanted = pool.random(2, row + 1, sizes.heads, sizes.rank)
        untouched, layer = found[row].clone(), pool.kv[:, 1]
        chunk_latents(query, pool.ints(*blocks), pool.table, layer, sizes, found)
        reference.chunk_latents(query, pool.ints(*blocks), pool.table, layer, sizes, wanted)
        assert_close(found[:row], wanted[:row])
        assert torch.equal(found[row], untouched), "a row of no block is left alone"


@pytest.mark.parametrize(("start", "count"), [(0, 150), (100, 70), (63, 1)])
def test_attention_with_keys_and_values_made_of_latents(
    device: torch.device, start: int, count: int
) -> None:
    for dtype in types_for(device, torch.float16, torch.bfloat16):
        sizes, tokens = SIZES[1], start + count
        pool = Pool(device, dtype, sizes, 5, [tokens])
        plain = pool.random(count, sizes.heads, sizes.query + 3)[..., : sizes.plain]
        turned = pool.random(count, sizes.heads, sizes.latent)[..., sizes.rank :]
        keys, values = (
            pool.random(sizes.heads, tokens, size) for size in (sizes.plain, sizes.value)
        )
        turned_keys = pool.random(tokens, sizes.latent)[:, sizes.rank :]
        found = pool.random(count, sizes.heads, sizes.value)
        expanded_attention(plain, turned, keys, turned_keys, values, start, sizes, found)
        scores = torch.einsum("thd,hnd->htn", plain.double(), keys.double())
        scores += torch.einsum("thd,nd->htn", turned.double(), turned_keys.double())
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(start + 1)
        weights = scores.mul(sizes.scale).masked_fill(hidden, -torch.inf).softmax(dim=-1)
        assert_close(found, torch.einsum("htn,hnd->thd", weights, values.double()))


@pytest.mark.parametrize("adapted", [False, True], ids=["base", "adapted"])
def test_a_long_chunk_attends_in_either_form(
    device: torch.device, adapted: bool, tmp_path: Path
) -> None:
    save(TINY_MODELS["deepseek-v2-lite"], tmp_path)
    shape = read_architecture(tmp_path)
    model = load_model(Checkpoint(tmp_path), shape, torch.float32, str(device))
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    def ints(*values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    start, count = 6, 21
    kv = random(*shape.pages_shape(8, 4))
    table = ints([0] * 8, [5, 2, 7, 1, 0, 3, 6, 4])
    attention = LatentAttention(model, kv, table, 32, 4)
    positions = torch.arange(start, start + count, dtype=torch.int32, device=device)
    stores = (table[1, positions.long() // 4] * 4 + positions % 4).int()
    qkv = random(count, len(model.layers[0].qkv.weight))
    blocks = ints((0, start, count, 1))
    sizes, adapters = attention._sizes, None
    slot = np.full(count, 1 if adapted else -1, np.int32)
    if adapted:
        outputs = shape.heads * (sizes.plain + sizes.value)
        stack = AdapterStack(random(2, 16, sizes.rank) / 4, random(2, outputs, 16) / 4, (outputs,))
        rows = SlotRows(*(torch.from_numpy(each).to(device) for each in arrange_rows(slot)))
        adapters = LatentAdapters(stack, rows, rows)
    projected = Projected(qkv, adapters=adapters)
    wanted = attention.of_blocks(positions, stores, blocks)(0, projected)
    slots = torch.ones_like(positions)
    for others in (0, 3):
        long = [LongChunk(others, count - others, start + others, 1)]
        inputs = np.zeros((4, count), np.int32), np.zeros((1, 4), np.int32)
        arrays = StepArrays(*inputs, long, 0, adapters=slot if adapted else None)
        attend = attention.of_any(
            arrays, slots, positions, stores, ints((0, start, others, 1)), slots[:0]
        )
        assert_close(attend(0, projected), wanted)


def test_few_rows_absorb_in_the_kernel_that_stores(device: torch.device) -> None:
    for dtype in types_for(device, torch.float16, torch.bfloat16):
        for sizes in SIZES[:2]:
            pool = Pool(device, dtype, sizes, 5, [40, 40])
            weight = pool.random(sizes.heads, sizes.rank, sizes.plain)
            norm, kv = pool.random(sizes.rank), pool.kv.clone()
            made = pool.projected(7, sizes.heads * sizes.query + sizes.latent, late=False)
            positions = torch.arange(7, dtype=torch.int32, device=device)
            given = (made, pool.cos_sin, positions, positions * 2)
            _, found = absorb_and_store(*given, pool.kv[:, 1], sizes, norm, weight)
            wanted = pool.random(7, sizes.heads, sizes.latent)
            plain = reference.rotate_and_store_latents(*given, kv[:, 1], sizes, norm, wanted)
            products = torch.einsum("thk,hnk->thn", plain.double(), weight.double())
            wanted[..., : sizes.rank] = products
            assert_close(found, wanted)
            assert_close(pool.kv, kv)

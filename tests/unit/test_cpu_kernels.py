"""Compiled products and attention against torch's own path, which float64 takes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
import torch
from emulated_tiles import emulated_tiles
from engine_loop import load, serve
from kernel_checks import assert_close
from kv_codes import encode
from tiny_models import TINY_MODELS, generate_with_transformers, save
from torch import Tensor

from baton.engine.model_choice import KvDtype
from baton.kernels.attention import (
    ChunkReads,
    DecodeReads,
    Scoring,
    chunk_attention,
    decode_attention,
)
from baton.kernels.cache import LayerCache, layer_caches, rotate_and_write_, token_rows
from baton.kernels.cpu import compiler
from baton.kernels.linear import Activation, GatedLinear, Linear, RMSNorm

compiled = pytest.mark.skipif(not compiler.available(), reason="needs compiled kernels")

SCORING = Scoring(0.125)
NO_NORMS = (None, None)
ROWS = [*range(1, 10), 16, 37]
SHAPES = [(4, 12), (48, 199), (80, 13), (132, 120), (576, 40)]  # (inputs, outputs)
HEADS = [  # (heads, kv_heads, head_dim, page_size)
    (9, 3, 64, 16),
    (4, 4, 8, 1),
    (8, 1, 80, 5),
    (14, 2, 96, 32),
    (16, 1, 128, 16),
    (10, 2, 256, 4),
    (13, 1, 12, 7),
]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """New memory holds NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def thread_counts() -> Iterator[range]:
    before = torch.get_num_threads()
    yield range(1, 4)
    torch.set_num_threads(before)


def weights(outputs: int, inputs: int, biased: bool) -> tuple[Tensor, Tensor | None]:
    weight = torch.randn(outputs, inputs) / inputs**0.5
    return weight, torch.randn(outputs) if biased else None


def linears(outputs: int, inputs: int, biased: bool) -> tuple[Linear, Linear]:
    """The same in float32, compiled, and in float64."""
    weight, bias = weights(outputs, inputs, biased)
    layer = Linear(weight, bias)
    layer.pack()
    assert layer.weight.is_meta
    return layer, Linear(weight.double(), None if bias is None else bias.double())


def norms(size: int) -> tuple[RMSNorm, RMSNorm]:
    weight = torch.rand(size) + 0.5
    return RMSNorm(weight, 1e-5), RMSNorm(weight.double(), 1e-5)


@compiled
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_product_is_torchs(inputs: int, outputs: int, biased: bool) -> None:
    layer, reference = linears(outputs, inputs, biased)
    norm, norm_reference = norms(inputs)
    for rows in ROWS:
        x, residual = torch.randn(rows, inputs) * 3, torch.randn(rows, outputs)
        assert_close(layer(x), reference(x.double()))
        assert_close(layer(x, norm), reference(x.double(), norm_reference))
        assert_close(layer.add_to(residual, x), reference.add_to(residual.double(), x.double()))
        columns = x.t().contiguous().t()
        assert torch.equal(layer(columns), layer(x))


@compiled
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_gated_product_is_torchs(
    inputs: int, outputs: int, biased: bool, activation: Activation
) -> None:
    weight, bias = weights(2 * outputs, inputs, biased)
    layer = GatedLinear(weight, bias, activation)
    layer.pack()
    assert layer.weight.is_meta
    exact = None if bias is None else bias.double()
    reference = GatedLinear(weight.double(), exact, activation)
    norm, norm_reference = norms(inputs)
    for rows in ROWS:
        x = torch.randn(rows, inputs) * 3
        assert_close(layer(x, norm), reference(x.double(), norm_reference))
        assert_close(layer(x, None), reference(x.double(), None))


@compiled
@pytest.mark.parametrize("size", [48, 36, 576])
def test_normed_rows_are_added_as_by_torch(size: int) -> None:
    norm, reference = norms(size)
    for rows in ROWS:
        x, residual = torch.randn(rows, size) * 3, torch.randn(rows, size)
        assert_close(norm.add_to(residual, x), reference.add_to(residual.double(), x.double()))


@compiled
def test_a_gate_far_from_zero_is_open_or_shut() -> None:
    gate, up = torch.tensor([[1.0, 0.0]] * 12), torch.tensor([[0.0, 1.0]] * 12)
    layer = GatedLinear(torch.cat((gate, up)).repeat(1, 2))
    layer.pack()
    for strength, wanted in ((1e3, 1e3), (-1e3, 0.0), (-60.0, 0.0)):
        x = torch.tensor([[strength, 1.0, 0.0, 0.0]])
        norm = RMSNorm(torch.full((4,), float(x.square().mean().sqrt())), 0.0)
        torch.testing.assert_close(layer(x, norm), torch.full((1, 12), wanted))


@compiled
def test_a_row_is_the_same_in_any_company_and_on_any_number_of_threads(
    thread_counts: range,
) -> None:
    layer, _ = linears(199, 576, biased=True)
    norm, _ = norms(576)
    x = torch.randn(21, 576)
    alone = torch.cat([layer(row, norm) for row in x.split(1)])
    for threads in thread_counts:
        torch.set_num_threads(threads)
        for start, end in pairwise((0, 3, 11, 12, 21)):
            assert torch.equal(layer(x[start:end], norm), alone[start:end])


def test_what_no_code_is_compiled_for_is_torchs() -> None:
    for outputs, inputs in ((11, 30), (64, 30)):
        layer = Linear(*weights(outputs, inputs, biased=True))
        layer.pack()
        assert not layer.weight.is_meta
        assert layer(torch.randn(3, inputs)).isfinite().all()


class Pages:
    """Random queries, and pages of two layers, of which the second is read."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
        self._width, self.page_size = 600 // page_size + 1, page_size
        pages = 3 * self._width
        self.kv = torch.randn(pages, 2, 2, page_size, kv_heads, head_dim)
        self.query = torch.randn(3, heads + 2, head_dim)[:, :heads] * 2
        self.tables = torch.randperm(pages).view(3, -1)

    @property
    def cache(self) -> LayerCache:
        return layer_caches(self.kv)[1]

    def reads(self, first: list[int], end: list[int]) -> DecodeReads:
        width = (max(end) - 1) // self.page_size + 1
        tables = self.tables[: len(end), :width].contiguous()
        start = torch.zeros(len(end), dtype=torch.int64)
        return DecodeReads(tables, start, torch.tensor(first), torch.tensor(end), max(end), False)


@compiled
@pytest.mark.parametrize("scoring", [Scoring(0.125), Scoring(0.3, 5.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("shape", HEADS)
def test_attention_over_pages_is_torchs(shape: tuple[int, int, int, int], scoring: Scoring) -> None:
    pages = Pages(*shape)
    reference = layer_caches(pages.kv.double())[1]
    for sinks in (None, torch.linspace(-3.0, 9.0, shape[0])):
        for first, end in (([0, 0, 0], [1, 257, 600]), ([0, 200, 255], [2, 511, 259])):
            reads = pages.reads(first, end)
            found = decode_attention(pages.query, pages.cache, reads, scoring, sinks)
            query = pages.query.double()
            assert_close(found, decode_attention(query, reference, reads, scoring, sinks))


@compiled
def test_a_sink_that_weighs_nothing_changes_no_bit() -> None:
    pages = Pages(9, 3, 64, 16)
    reads = pages.reads([0, 200, 255], [1, 511, 600])
    wanted = decode_attention(pages.query, pages.cache, reads, SCORING)
    for score in (-torch.inf, -100.0):
        sinks = torch.full((9,), score)
        assert torch.equal(
            decode_attention(pages.query, pages.cache, reads, SCORING, sinks), wanted
        )


LATENTS = [(4, 32, 8, 16), (16, 512, 64, 5), (9, 12, 4, 7)]  # (heads, rank, rotated, page_size)


@compiled
@pytest.mark.parametrize("shape", LATENTS)
def test_attention_over_latents_is_torchs(shape: tuple[int, int, int, int]) -> None:
    heads, rank, rotated, page_size = shape
    pages = Pages(heads, 1, rank + rotated, page_size)
    pages.kv = pages.kv[:, :, :1].contiguous()
    cache, reference = (layer_caches(kv, rank)[1] for kv in (pages.kv, pages.kv.double()))
    reads, scoring = pages.reads([0, 0, 0], [1, 257, 600]), Scoring(0.06)
    found = decode_attention(pages.query, cache, reads, scoring)
    assert_close(found, decode_attention(pages.query.double(), reference, reads, scoring))
    chunk = ChunkReads(pages.tables[0], 0, 250, 253, None)
    found = chunk_attention(pages.query, cache, chunk, scoring)
    assert_close(found, chunk_attention(pages.query.double(), reference, chunk, scoring))


@compiled
@pytest.mark.parametrize("shape", LATENTS)
def test_norm_rotation_and_storing_of_latents_are_torchs(shape: tuple[int, int, int, int]) -> None:
    heads, rank, rotated, page_size = shape
    size = rank + rotated
    weight = torch.rand(rank) + 0.5
    for rows in (1, 40):
        kv, qk = torch.randn(50, 2, 1, page_size, 1, size), torch.randn(rows, heads + 1, size)
        angles = torch.randn(rows, 1, size // 2)
        angles[..., : rank // 2] = 0.0
        rotation = torch.polar(torch.ones_like(angles), angles)
        pages, last = torch.randperm(50)[:rows], torch.tensor(page_size - 1)
        places = token_rows(pages, last, 2, page_size, 1)
        exact, exact_qk = kv.double(), qk.double()
        for memory, numbers, kind in ((kv, qk, weight), (exact, exact_qk, weight.double())):
            cache = layer_caches(memory, rank)[1]
            rotate_and_write_(numbers, heads, (None, RMSNorm(kind, 1e-6)), rotation, cache, places)
        assert_close(qk, exact_qk)
        assert_close(kv, exact)


@compiled
@pytest.mark.parametrize(("inputs", "outputs"), [(132, 120), (576, 40), (64, 10)])
def test_bfloat16_products_are_close(inputs: int, outputs: int) -> None:
    weight, bias = (
        each.bfloat16() for each in weights(2 * outputs, inputs, True) if each is not None
    )
    layer, gated = Linear(weight, bias), GatedLinear(weight, bias)
    for each in (layer, gated):
        each.pack()
        assert each.weight.is_meta
    norm = RMSNorm((torch.rand(inputs) + 0.5).bfloat16(), 1e-5)
    exact = RMSNorm(norm.weight.double(), 1e-5)
    reference = Linear(weight.double(), bias.double())
    gated_reference = GatedLinear(weight.double(), bias.double())
    for rows in ROWS:
        x, residual = (
            torch.randn(rows, inputs).bfloat16(),
            torch.randn(rows, 2 * outputs).bfloat16(),
        )
        assert_close(layer(x, norm), reference(x.double(), exact))
        assert_close(layer.add_to(residual, x), reference.add_to(residual.double(), x.double()))
        assert_close(gated(x, norm), gated_reference(x.double(), exact))


@compiled
@pytest.mark.parametrize("shape", HEADS[:3])
def test_bfloat16_attention_is_close(shape: tuple[int, int, int, int]) -> None:
    pages = Pages(*shape)
    reads = pages.reads([0, 200, 0], [1, 511, 600])
    rounded, query = layer_caches(pages.kv.bfloat16())[1], pages.query.bfloat16()
    exact = layer_caches(pages.kv.bfloat16().double())[1]
    wanted = decode_attention(query.double(), exact, reads, SCORING)
    assert_close(decode_attention(query, rounded, reads, SCORING), wanted)


def unrounded_logits() -> None:
    weight, norm = torch.randn(199, 96).bfloat16(), RMSNorm(torch.rand(96).bfloat16(), 1e-5)
    head = Linear(weight)
    head.pack()
    for rows in (1, 5, 37):
        x = torch.randn(rows, 96).bfloat16()
        found = head.logits(x, norm)
        torch.testing.assert_close(found, norm(x).float() @ weight.float().t(), rtol=0, atol=1e-4)
        assert torch.equal(found.bfloat16(), head(x, norm))


@compiled
def test_logits_of_bfloat16_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    unrounded_logits()
    with emulated_tiles(monkeypatch):
        unrounded_logits()


@compiled
@pytest.mark.parametrize("shape", [(9, 3, 64, 16), (33, 1, 32, 5), (14, 2, 96, 32)])
def test_attention_on_tile_registers_is_close(
    shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with emulated_tiles(monkeypatch):
        test_bfloat16_attention_is_close(shape)


def latents_in_bfloat16(heads: int, rank: int, rotated: int, page_size: int) -> None:
    """Three tokens alone are close to float64, and as a chunk's last."""
    pages = Pages(heads, 1, rank + rotated, page_size)
    kv, query, scoring = pages.kv[:, :, :1].bfloat16(), pages.query.bfloat16(), Scoring(0.06)
    cache, exact = layer_caches(kv, rank)[1], layer_caches(kv.double(), rank)[1]
    pages.tables[1:] = pages.tables[0]
    reads = pages.reads([0, 0, 0], [298, 299, 300])
    found = decode_attention(query, cache, reads, scoring)
    assert_close(found, decode_attention(query.double(), exact, reads, scoring))
    chunk = ChunkReads(pages.tables[0], 0, 297, 300, None)
    assert torch.equal(chunk_attention(query, cache, chunk, scoring), found)


@compiled
@pytest.mark.parametrize("shape", [(17, 64, 32, 5), (16, 512, 64, 16)])
def test_latents_in_bfloat16_by_vectors_and_on_tile_registers(
    shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    latents_in_bfloat16(*shape)
    with emulated_tiles(monkeypatch):
        latents_in_bfloat16(*shape)


@compiled
def test_weights_for_tile_registers_are_pairs_of_inputs() -> None:
    from baton.kernels.cpu import amx

    weight = torch.arange(64 * 96).view(64, 96)
    packed = amx.packed(weight)
    assert packed.shape == (2, 3, 2, 16, 16, 2)
    for panel, step, half, pair, output, parity in ((1, 2, 0, 3, 5, 1), (0, 1, 1, 15, 9, 0)):
        row, column = 32 * panel + 16 * half + output, 32 * step + 2 * pair + parity
        assert packed[panel, step, half, pair, output, parity] == weight[row, column]


@compiled
def test_attention_does_not_read_what_a_query_does_not_see() -> None:
    pages = Pages(9, 3, 64, 16)
    reads = pages.reads([0, 40, 260], [5, 300, 599])
    before = decode_attention(pages.query, pages.cache, reads, SCORING)
    seen = torch.zeros(pages.kv.shape[0] * 16, dtype=torch.bool)
    for table, first, end in zip(pages.tables, reads.first, reads.end, strict=True):
        tokens = torch.arange(int(first), int(end))
        seen[table[tokens // 16] * 16 + tokens % 16] = True
    hidden = (~seen).nonzero().squeeze(1)
    pages.kv[hidden // 16, :, :, hidden % 16] = torch.nan
    pages.kv[:, 0] = torch.nan
    assert torch.equal(decode_attention(pages.query, pages.cache, reads, SCORING), before)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
def test_what_is_not_a_number_spoils_all_that_it_is_used_for(
    dtype: torch.dtype, kv_dtype: KvDtype
) -> None:
    """A model whose numbers overflow ends in an error, so attention must not hide them."""
    pages = Pages(8, 2, 64, 16)
    kv, query = pages.kv.to(dtype), pages.query.to(dtype)
    query[0, 3, 5] = torch.nan
    kv[pages.tables[1, 2], 1, 0, 7, 0, 9] = torch.nan  # a key of position 39
    kv[pages.tables[2, 1], 1, 1, 3, 1, 20] = torch.nan  # a value of position 19
    cache = layer_caches(encode(kv, kv_dtype))[1]
    found = decode_attention(query, cache, pages.reads([0, 0, 0], [300, 40, 600]), SCORING)
    spoiled = found.view(3, 8, 64).isnan()
    heads = torch.zeros(3, 8, dtype=torch.bool)
    heads[0, 3] = heads[1, :4] = heads[2, 4:] = True
    assert torch.equal(spoiled.any(-1), heads)
    assert bool(spoiled[:2].all(-1).eq(heads[:2]).all())
    chunk = ChunkReads(pages.tables[0, :19].contiguous(), 0, 298, 300, None)
    found = chunk_attention(query[0, :8].expand(2, -1, -1).contiguous(), cache, chunk, SCORING)
    assert torch.equal(found.view(2, 8, 64).isnan().all(-1), heads[:1].expand(2, -1))


@compiled
def test_attention_is_the_same_in_any_batch_and_on_any_number_of_threads(
    thread_counts: range,
) -> None:
    pages = Pages(9, 3, 64, 16)
    ends = [300, 17, 600]
    together = decode_attention(pages.query, pages.cache, pages.reads([0, 0, 0], ends), SCORING)
    for threads in thread_counts:
        torch.set_num_threads(threads)
        alone = decode_attention(pages.query[:1], pages.cache, pages.reads([0], ends[:1]), SCORING)
        assert torch.equal(alone, together[:1])


@compiled
@pytest.mark.parametrize("turning", [True, False])
@pytest.mark.parametrize("shape", HEADS)
def test_rotation_and_storing_are_torchs(shape: tuple[int, int, int, int], turning: bool) -> None:
    heads, kv_heads, head_dim, page_size = shape
    for rows in (1, 5, 40):
        kv = torch.randn(50, 2, 2, page_size, kv_heads, head_dim)
        kv_reference = kv.double()
        qkv = torch.randn(rows, heads + 2 * kv_heads, head_dim)
        qkv_reference = qkv.double()
        angles = torch.randn(rows, 1, head_dim // 2)
        rotation = torch.polar(torch.rand_like(angles) + 0.5, angles) if turning else None
        places = token_rows(torch.randperm(50)[:rows], torch.tensor(page_size - 1), 2, page_size)
        rotate_and_write_(qkv, heads, NO_NORMS, rotation, layer_caches(kv)[1], places)
        rotate_and_write_(
            qkv_reference, heads, NO_NORMS, rotation, layer_caches(kv_reference)[1], places
        )
        assert_close(qkv, qkv_reference)
        assert_close(kv, kv_reference)


@pytest.mark.parametrize(
    "name", ["llama-biases", "mistral-window", "qwen3", "gpt-oss", "deepseek-v3"]
)
def test_without_a_compiler_the_engine_answers_as_transformers_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(compiler, "available", lambda: False)
    oracle = save(TINY_MODELS[name], tmp_path)
    prompts = [list(range(1, length)) for length in (2, 24, 61)]
    expected = [generate_with_transformers(oracle, prompt, 12) for prompt in prompts]
    assert serve(load(tmp_path), prompts, 12, chunk=9) == expected

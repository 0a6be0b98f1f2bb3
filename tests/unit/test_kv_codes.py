"""Keys and values as codes: what is stored and read, whole models, pools, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_tiles import emulated_tiles
from engine_loop import KV_MEMORY, answer, load, sequence, serve
from kv_codes import encode
from rank_threads import split_engine
from tiny_models import TINY_MODELS, choices_of_transformers, save
from torch import Tensor
from transformers.cache_utils import Cache

from baton.cluster.preflight import engine_note, prepare
from baton.core.config import parse
from baton.core.errors import InvalidConfig
from baton.engine import engine as engines
from baton.engine.engine import Engine
from baton.engine.model_choice import KvDtype, stored_shape
from baton.kernels.attention import (
    ChunkReads,
    DecodeReads,
    Scoring,
    chunk_attention,
    decode_attention,
)
from baton.kernels.cache import layer_caches, rotate_and_write_, token_rows, write_
from baton.kernels.cpu import compiler
from baton.kernels.half_bytes import half_byte_codes, half_byte_numbers
from baton.kernels.head_sizes import gpu_stored_bytes, head_dim_of, stored_bytes
from baton.kernels.integers import head_codes, head_numbers
from baton.kernels.linear import RMSNorm
from baton.kv_transfer.pool_layout import HeadRange, describe_mismatch, links
from baton.v1.transfer_pb2 import PoolAddress, PoolShard
from baton.worker.backend import pool_layout, pool_memory

DTYPES = [torch.float32, torch.bfloat16]
STORED = [torch.int8, torch.uint8]
"""Of pages in int8 and int4."""

KV_DTYPES: dict[torch.dtype, KvDtype] = {torch.int8: "int8", torch.uint8: "int4"}
PROMPTS = [[(7 * at * at + at) % 199 for at in range(length)] for length in (1, 6, 70)]
ANSWER = 6
CHOICES: list[KvDtype] = ["auto", "int8", "int4"]
MODELS = ["llama-biases", "qwen3", "gemma2", "gemma3", "gpt-oss"]
SHAPES = [(9, 3, 64, 16), (4, 4, 8, 5), (14, 2, 96, 32), (6, 1, 12, 1)]
"""(heads, key heads, head_dim, page_size)"""


def test_a_heads_greatest_number_has_the_greatest_code() -> None:
    heads = torch.zeros(2, 2, 8)
    heads[0, 0, :3] = torch.tensor([0.5, -2.0, 1.0])
    found = head_codes(heads)
    assert found.shape == (2, 2, 12)
    assert found[0, 0, :4].tolist() == [32, -127, 64, 0]
    assert float(found[0, 0, 8:].view(torch.float32)) == torch.tensor(2.0) / 127
    assert not head_numbers(found)[1].any()


def decode(codes: Tensor) -> Tensor:
    return head_numbers(codes) if codes.dtype == torch.int8 else half_byte_numbers(codes)


def test_a_group_of_int4_has_its_least_and_greatest_numbers_at_its_ends() -> None:
    heads = torch.linspace(-1.0, 3.0, 16).repeat(2)
    heads[16:] *= -2.0
    found = half_byte_codes(heads)
    assert found.shape == (24,)
    assert found[:16].tolist() == [at | (15 - at) << 4 for at in range(16)]
    scales_and_middles = found[16:].view(torch.bfloat16).float()
    assert scales_and_middles.tolist() == pytest.approx([4 / 15, 1.0, 8 / 15, -2.0], rel=2**-8)
    torch.testing.assert_close(half_byte_numbers(found), heads, atol=0.02, rtol=0.0)


def test_a_number_of_int4_is_off_by_half_a_step_of_its_group() -> None:
    heads = torch.randn(100, 3, 80) * torch.logspace(-6, 6, 100)[:, None, None]
    groups = heads.unflatten(-1, (-1, 16))
    steps = (groups.amax(dim=-1, keepdim=True) - groups.amin(dim=-1, keepdim=True)) / 15
    numbers = half_byte_numbers(half_byte_codes(heads)).unflatten(-1, (-1, 16))
    assert ((numbers - groups).abs() <= 0.56 * steps).all()  # rounded to bfloat16, both
    zeros = half_byte_numbers(half_byte_codes(torch.zeros(2, 8)))
    assert (zeros.abs() < 1e-30).all()


def test_the_bytes_of_a_head_tell_its_size() -> None:
    for size in range(4, 520, 4):
        assert head_dim_of(stored_bytes(size)) == size
        assert stored_bytes(size) <= gpu_stored_bytes(size)
    assert (stored_bytes(64), stored_bytes(128)) == (48, 96)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_code_stores_the_bits_of_torchs(
    shape: tuple[int, int, int, int], dtype: torch.dtype, stored: torch.dtype
) -> None:
    heads, kv_heads, head_dim, page_size = shape
    norms = tuple(RMSNorm(torch.rand(head_dim).to(dtype), 1e-6) for _ in range(2))
    for rows in (1, 40):
        size = stored_shape((50, 2, 2, page_size, kv_heads, head_dim), KV_DTYPES[stored], "cpu")
        kv = torch.zeros(size, dtype=stored)
        qkv, again = torch.randn(rows, heads + 2 * kv_heads, head_dim).to(dtype), kv.clone()
        qkv[-1, heads + kv_heads :] = 0.0
        angles = torch.randn(rows, 1, head_dim // 2)
        rotation = torch.polar(torch.ones_like(angles), angles)
        places = token_rows(torch.randperm(50)[:rows], torch.tensor(page_size - 1), 2, page_size)
        cache = layer_caches(kv)[1]
        assert cache.value_dim == head_dim
        rotate_and_write_(qkv, heads, (norms[0], norms[1]), rotation, cache, places)
        write_(layer_caches(again)[1], places, qkv[:, heads:])
        assert torch.equal(kv, again)
        assert int(kv.count_nonzero())


class Codes:
    """Queries of three sequences, and pages of two layers, of which the second is read."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, stored: torch.dtype
    ) -> None:
        heads, kv_heads, head_dim, self._page_size = shape
        width = 600 // self._page_size + 1
        self.query = (2 * torch.randn(3, heads, head_dim)).to(dtype)
        numbers = torch.randn(3 * width, 2, 2, self._page_size, kv_heads, head_dim)
        # Scales of tokens and heads differ.
        self.kv = encode(numbers * torch.rand(*numbers.shape[:-1], 1) * 2, KV_DTYPES[stored])
        self._tables = torch.randperm(3 * width).view(3, -1)

    def attend(self, query: Tensor, kv: Tensor, scoring: Scoring, sinks: Tensor) -> Tensor:
        """Queries of their own, and one chunk after another, the second with a window."""
        cache, zeros = layer_caches(kv)[1], torch.zeros(3, dtype=torch.int64)
        reads = DecodeReads(self._tables, zeros, zeros + 2, torch.tensor([3, 257, 600]), 600, False)
        found = [decode_attention(query, cache, reads, scoring, sinks)]
        for window in (None, 100):
            chunk = ChunkReads(self._tables[0], 0, 297, 300, window)
            found.append(chunk_attention(query, cache, chunk, scoring, sinks))
        return torch.stack(found)


def assert_reads_numbers(
    shape: tuple[int, int, int, int], dtype: torch.dtype, stored: torch.dtype
) -> None:
    # Tile registers take what codes of four bits stand for in bfloat16.
    tiles = compiler.available() and compiler.has_amx() and shape[2] % 32 == 0
    narrow = tiles and dtype == torch.bfloat16 and stored == torch.uint8
    operand = torch.bfloat16 if narrow else torch.float32
    pages, sinks = Codes(shape, dtype, stored), torch.linspace(-3.0, 5.0, shape[0])
    for scoring in (Scoring(0.125), Scoring(0.3, 5.0)):
        found = pages.attend(pages.query, pages.kv, scoring, sinks)
        numbers = decode(pages.kv).to(operand).double()
        wanted = pages.attend(pages.query.double(), numbers, scoring, sinks)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_of_the_numbers_that_codes_stand_for(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    stored: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert_reads_numbers(shape, dtype, stored)
    monkeypatch.setattr(compiler, "available", lambda: False)
    assert_reads_numbers(shape, dtype, stored)


@pytest.mark.skipif(not compiler.available(), reason="needs compiled kernels")
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("shape", [(9, 3, 64, 16), (33, 1, 32, 5)])
def test_attention_on_tile_registers(
    shape: tuple[int, int, int, int], stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with emulated_tiles(monkeypatch):
        assert_reads_numbers(shape, torch.bfloat16, stored)


def in_pairs(keys: Tensor) -> Tensor:
    """transformers' keys in our order: numbers that are rotated into each other are neighbours."""
    return torch.stack(keys.chunk(2, dim=-1), dim=-1).flatten(-2)


def apart(keys: Tensor) -> Tensor:
    """The opposite."""
    return torch.cat((keys[..., ::2], keys[..., 1::2]), dim=-1)


@pytest.fixture(params=STORED)
def rounding_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KvDtype:
    """transformers' cache keeps what codes stand for."""
    update, kv_dtype = Cache.update, KV_DTYPES[request.param]

    def rounding(self: Cache, keys: Tensor, values: Tensor, *more: Any, **others: Any) -> Any:
        values = decode(encode(values, kv_dtype))
        keys = apart(decode(encode(in_pairs(keys), kv_dtype)))
        return update(self, keys, values, *more, **others)

    monkeypatch.setattr(Cache, "update", rounding)
    if kv_dtype == "int4":  # other factors of keys are other codes, and far apart
        plain = engines.load_model

        def unbalanced(*given: Any, **options: Any) -> Any:
            return plain(*given, **options | {"balanced": False})

        monkeypatch.setattr(engines, "load_model", unbalanced)
    return kv_dtype


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_transformers_with_the_same_codes(
    name: str, rounding_cache: KvDtype, tmp_path: Path
) -> None:
    whole_codes = {"head_dim": 24} if name == "llama-biases" else {}
    oracle = save(TINY_MODELS[name].changed(**whole_codes), tmp_path)
    answers = serve(load(tmp_path, kv_dtype=rounding_cache), PROMPTS, ANSWER, chunk=16)
    assert answers == choices_of_transformers(oracle, PROMPTS, answers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [("llama", "int8"), ("gemma3", "int8"), ("qwen2-moe", "int8"), ("gemma3", "int4")],
)
def test_answers_do_not_depend_on_company(
    name: str, kv_dtype: str, quantization: str, dtype: str, tmp_path: Path
) -> None:
    """Nor on sizes of pages and chunks: all read what was stored."""
    save(TINY_MODELS[name], tmp_path)
    options = {"dtype": dtype, "quantization": quantization, "kv_dtype": kv_dtype}
    together = serve(load(tmp_path, 4, **options), PROMPTS, ANSWER, chunk=7)
    engine = load(tmp_path, **options)
    assert together == [answer(engine, each, ANSWER) for each in PROMPTS]


def test_pages_are_a_quarter_or_half_as_large_and_scales(tmp_path: Path) -> None:
    save(TINY_MODELS["llama-head-dim"], tmp_path)
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        plain, codes = load(tmp_path, dtype=dtype), load(tmp_path, dtype=dtype, kv_dtype="int8")
        assert codes.kv[0].nbytes * 32 * size == plain.kv[0].nbytes * (32 + 4)
        assert codes.pool.total == KV_MEMORY // codes.kv[0].nbytes > 1.7 * plain.pool.total
        halves = load(tmp_path, dtype=dtype, kv_dtype="int4")
        assert halves.kv[0].nbytes * 32 * size == plain.kv[0].nbytes * (16 + 2 * 4)
        assert halves.pool.total > 1.4 * codes.pool.total


def test_pools_of_other_codes_or_numbers_are_no_peers(tmp_path: Path) -> None:
    save(TINY_MODELS["llama-head-dim"], tmp_path)
    plain, codes, others, halves = (
        pool_layout(load(tmp_path, dtype=dtype, kv_dtype=kv_dtype))
        for dtype, kv_dtype in (
            ("float32", "auto"),
            ("float32", "int8"),
            ("bfloat16", "int8"),
            ("float32", "int4"),
        )
    )
    assert describe_mismatch(codes, halves) == (
        "dtype is 'int8 from float32' here and 'int4 from float32' there"
    )
    assert describe_mismatch(plain, codes) == (
        "dtype is 'float32' here and 'int8 from float32' there"
    )
    assert describe_mismatch(codes, others) == (
        "dtype is 'int8 from float32' here and 'int8 from bfloat16' there"
    )


def pushed(source: Engine, ranks: list[Engine]) -> None:
    """Copies all pages of a pool to one of several shards, by the bytes that a transfer moves."""
    memories = [pool_memory(each) for each in ranks]
    shards = [
        PoolShard(first_head=2 * rank, heads=2, pool=PoolAddress(page_bytes=memory.page_bytes))
        for rank, memory in enumerate(memories)
    ]
    whole = pool_memory(source).page_bytes
    address = PoolAddress(page_bytes=whole, layout=pool_layout(source), shards=shards)
    for link, engine in zip(links([HeadRange(0, 4)], whole, address), ranks, strict=True):
        assert link.part is not None
        here, there = (
            each.kv.view(torch.uint8).view(len(each.kv), link.part.rows, -1)
            for each in (source, engine)
        )
        start, end = link.part.local_offset, link.part.local_offset + link.part.row_bytes
        there[:, :, link.part.remote_offset :] = here[:, :, start:end]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES.values())
def test_ranks_take_over_the_codes_of_their_heads(kv_dtype: KvDtype, tmp_path: Path) -> None:
    """What one rank prefilled, two continue."""
    save(TINY_MODELS["llama"].changed(head_dim=24), tmp_path / "model")
    whole, prompt = load(tmp_path / "model", kv_dtype=kv_dtype), PROMPTS[2]
    with split_engine(tmp_path / "model", 2, tmp_path, kv_dtype=kv_dtype) as split:
        ranks = [split.engine, *split.others]
        assert split.engine.fingerprint == whole.fingerprint
        assert pool_layout(split.engine) == pool_layout(whole)
        prefilled = sequence(whole, prompt, 2)
        (first,) = whole.step({prefilled: len(prompt)})
        pushed(whole, ranks)
        assert torch.equal(torch.cat([rank.kv for rank in ranks], dim=4), whole.kv)
        continued = sequence(split.engine, prompt, 2)
        continued.computed = len(prompt)
        drawn = []
        for engine, each in ((whole, prefilled), (split.engine, continued)):
            assert isinstance(first, int)
            each.append(first)
            drawn += engine.step({each: 1})
        assert drawn[0] == drawn[1]


def test_models_through_transformers_keep_their_dtype(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    with pytest.raises(InvalidConfig, match="through transformers has pages of its own dtype"):
        Engine.load(tmp_path, engine="transformers", kv_dtype="int8")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama",
            {"kv_dtype": "fp8", "device": "cpu"},
            "CPUs have int8 or int4 pages, not fp8; kv_dtype is fp8",
        ),
        ("llama", {"engine": "transformers"}, "through transformers has pages of its own dtype"),
        ("deepseek-v3", {}, "pages of latents are not quantized yet"),
        ("deepseek-v3", {"kv_dtype": "int4"}, "latents are not quantized yet; kv_dtype is int4"),
        ("llama-odd", {}, "heads of 6 numbers, no multiple of 4, are not quantized"),
        ("llama", {"decode": {"kv_memory": 512}}, "holds no page: one takes 6144"),
        (
            "gemma3",
            {"kv_dtype": "int4", "device": "cuda"},
            "GPUs have no int4 pages of heads above 128 numbers yet; kv_dtype is int4",
        ),
        ("llama", {"kv_dtype": "int4"}, "heads of 12 numbers, no multiple of 8, are not kept in"),
        (
            "llama-head-dim",
            {"decode": {"kv_memory": 512}, "kv_dtype": "int4"},
            "holds no page: one takes 4608",
        ),
    ],
)
def test_what_codes_do_not_go_with_is_refused_before_the_start(
    name: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    models = TINY_MODELS | {"llama-odd": TINY_MODELS["llama"].changed(head_dim=6)}
    save(models[name], tmp_path)
    config = parse({"model": str(tmp_path), "kv_dtype": "int8", **changes})
    with pytest.raises(InvalidConfig, match=message):
        prepare(config)


def test_int4_warns_before_the_start_and_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(TINY_MODELS["llama-head-dim"], tmp_path)
    notes = [engine_note(parse({"model": str(tmp_path), "kv_dtype": each})) for each in CHOICES]
    assert notes[:2] == ["", ""]
    assert "int4 pages change answers" in notes[2]
    for each in CHOICES:
        load(tmp_path, kv_dtype=each)
        assert (notes[2] in caplog.text) == (each == "int4")

"""A row's numbers, bit for bit, alone and in any company, on a CPU with compiled kernels.

Vectors of other CPUs are compiled too: LLVM cuts them into this one's. Tile registers are
emulated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from emulated_tiles import emulated_tiles
from kv_codes import encode
from tiny_models import TINY_MODELS, save
from torch import Tensor

from baton.engine.architecture import read_architecture
from baton.engine.checkpoint import Checkpoint
from baton.engine.empty_pages import stored_dtype
from baton.engine.model import Model
from baton.engine.model_choice import KvDtype, stored_shape
from baton.engine.rope import Rope
from baton.engine.rotations import Rotation
from baton.engine.runner import Runner
from baton.engine.step import ChunkInputs
from baton.engine.weights import load_model
from baton.kernels.attention import (
    ChunkReads,
    DecodeReads,
    Scoring,
    chunk_attention,
    decode_attention,
)
from baton.kernels.cache import LayerCache, layer_caches, rotate_and_write_, token_rows
from baton.kernels.cpu import compiler
from baton.kernels.cpu.compiler import AVX2, AVX512, Registers
from baton.kernels.experts import NO_BIASES, ExpertBiases, Experts
from baton.kernels.linear import GatedLinear, Linear, RMSNorm
from baton.kernels.routing import Routing

pytestmark = pytest.mark.skipif(not compiler.available(), reason="needs compiled kernels")

DTYPES = [torch.float32, torch.bfloat16]
KV_DTYPES: list[KvDtype] = ["auto", "int8", "int4"]
SCORING = Scoring(0.125, 4.0)
MOST_ROWS = 256
"""Of a step."""
Shape = tuple[int, int, int]  # heads, key heads, head_dim
PROMPT = 50
"""Tokens of a whole model's prompt: several pages, and more than any window."""


@pytest.fixture(params=[AVX2, AVX512], ids=["avx2", "avx512"])
def _wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    registers: Registers = request.param
    monkeypatch.setattr(compiler, "registers", lambda: registers)


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def assert_rows_are_as_alone(function: Callable[[Tensor], Tensor], rows: Tensor) -> None:
    """For every number of rows, and wherever among them a row is."""
    torch.set_num_threads(1)
    alone = torch.cat([function(rows[row : row + 1]) for row in range(len(rows))])
    for count in range(1, len(rows) + 1):
        torch.set_num_threads(1 + count % 3)
        start = random.Random(count).randrange(len(rows) - count + 1)
        found = function(rows[start : start + count])
        assert torch.equal(found, alone[start : start + count]), count


def linear(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)


@pytest.mark.parametrize(("inputs", "outputs"), [(96, 199), (64, 10)])
def test_products(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    layer = Linear(*linear(outputs, inputs, dtype))
    norm = RMSNorm(torch.rand(inputs).to(dtype), 1e-5)
    layer.pack()
    assert layer.weight.is_meta
    rows = torch.randn(MOST_ROWS, inputs).to(dtype)
    assert_rows_are_as_alone(lambda x: layer(x, norm), rows)
    assert_rows_are_as_alone(layer, rows)
    # A residual is added to each row: the row's first numbers serve.
    residual = torch.randn(MOST_ROWS, inputs + outputs).to(dtype)
    assert_rows_are_as_alone(lambda x: layer.add_to(x[:, inputs:], x[:, :inputs]), residual)


def test_gated_products(dtype: torch.dtype) -> None:
    layer = GatedLinear(*linear(2 * 104, 96, dtype))
    layer.pack()
    assert layer.weight.is_meta
    norm = RMSNorm(torch.rand(96).to(dtype), 1e-5)
    rows = torch.randn(MOST_ROWS, 96).to(dtype)
    assert_rows_are_as_alone(lambda x: layer(x, norm), rows)


def test_normed_rows_added_to_a_residual(dtype: torch.dtype) -> None:
    norm = RMSNorm(torch.rand(96), 1e-5)
    rows = torch.randn(MOST_ROWS, 192).to(dtype)
    assert_rows_are_as_alone(lambda x: norm.add_to(x[:, 96:], x[:, :96]), rows)


ROUTINGS = [
    Routing(60, 4, 24, shared=2, shared_gate=True),
    Routing(32, 6, 24, scores="sigmoid", corrected=True, normalized=True, groups=4, top_groups=2,
            group_best=2, scale=2.5, shared=1),
    Routing(12, 3, 24, normalized=True, biased=True),
]  # fmt: skip


def expert_biases(routing: Routing, hidden: int, dtype: torch.dtype) -> ExpertBiases:
    if not routing.biased:
        return NO_BIASES
    sizes = (2 * routing.columns, hidden)
    return ExpertBiases(*(torch.randn(routing.every, size).to(dtype) for size in sizes))


@pytest.mark.parametrize("routing", ROUTINGS, ids=["gate", "groups", "biases"])
def test_experts(routing: Routing, dtype: torch.dtype) -> None:
    experts = Experts(
        routing,
        Linear(torch.randn(routing.outputs, 96).to(dtype)),
        torch.randn(routing.experts) if routing.corrected else None,
        torch.randn(routing.every, 2 * routing.columns, 96).to(dtype),
        torch.randn(routing.every, 96, routing.columns).to(dtype),
        "clamped_swiglu" if routing.biased else "silu",
        expert_biases(routing, 96, dtype),
    )
    experts.pack()
    assert experts.gate_up.is_meta
    norm = RMSNorm(torch.rand(96).to(dtype), 1e-5)
    rows = torch.randn(64, 96).to(dtype)
    assert_rows_are_as_alone(lambda x: experts.add_to(x, norm), rows)


def test_log_probabilities() -> None:
    """As engine.logprobs makes them, over a vocabulary that torch cuts among threads."""
    logits = torch.randn(24, 49_152) * 3
    assert_rows_are_as_alone(lambda some: some.log_softmax(dim=-1)[:, :9], logits)


def test_rotations_of_positions() -> None:
    rotation = Rotation(Rope("default", 1e4, 48), 64)
    positions = torch.randint(0, 100_000, (MOST_ROWS,))
    assert_rows_are_as_alone(lambda some: torch.view_as_real(rotation(some)), positions)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rotation_and_norms_of_heads(dtype: torch.dtype, kv_dtype: KvDtype) -> None:
    norms = tuple(RMSNorm(torch.rand(32).to(dtype), 1e-6) for _ in range(2))
    kv = torch.zeros(MOST_ROWS, 1, 2, 1, 2, 32, dtype=dtype)
    cache = layer_caches(encode(kv, kv_dtype))[0]
    turns = torch.polar(torch.ones(MOST_ROWS, 1, 16), torch.randn(MOST_ROWS, 1, 16))

    def rotated(rows: Tensor) -> Tensor:
        """The row's own number is its first; it chooses the rotation."""
        which = rows[:, 0, 0].long()
        qkv = rows[:, 1:].to(dtype, copy=True).contiguous()
        places = token_rows(which, torch.zeros_like(which), 1, 1)
        rotate_and_write_(qkv, 6, (norms[0], norms[1]), turns[which], cache, places)
        stored = cache.kv[which].flatten(1)
        return torch.cat((qkv.flatten(1), stored.float()), dim=1)

    rows = torch.randn(MOST_ROWS, 11, 32)
    rows[:, 0, 0] = torch.arange(MOST_ROWS)
    assert_rows_are_as_alone(rotated, rows)


class Context:
    """One sequence's queries, keys and values, the latter in pages of any size and order."""

    def __init__(self, shape: Shape, dtype: torch.dtype, kv_dtype: KvDtype = "auto") -> None:
        (heads, kv_heads, head_dim), self.length, self._kv_dtype = shape, 700, kv_dtype
        self.query = torch.randn(self.length, heads, head_dim).to(dtype) * 2
        self._tokens = torch.randn(self.length, 2, kv_heads, head_dim).to(dtype)
        self.sinks = 4 * torch.randn(heads)

    def pages(self, page_size: int) -> tuple[LayerCache, Tensor]:
        """The second of two layers, and the page ids."""
        count = -(-self.length // page_size)
        kv = torch.full((count + 3, 2, 2, page_size, *self._tokens.shape[2:]), torch.nan)
        table = torch.randperm(count + 3)[:count]
        positions = torch.arange(self.length)
        kv[table[positions // page_size], 1, :, positions % page_size] = self._tokens.float()
        if self._kv_dtype == "auto":
            kv = kv.to(self._tokens.dtype)
        return layer_caches(encode(kv, self._kv_dtype))[1], table

    def whole(self, window: int | None) -> Tensor:
        cache, table = self.pages(16)
        reads = ChunkReads(table, 0, 0, self.length, window)
        return chunk_attention(self.query, cache, reads, SCORING, self.sinks)


def decoded(context: Context, page_size: int, positions: list[int], window: int | None) -> Tensor:
    """The queries at these positions as single queries of one batch."""
    cache, table = context.pages(page_size)
    first = [0 if window is None else max(0, at - window + 1) for at in positions]
    starts = [each // page_size * page_size for each in first]
    ends = [at + 1 for at in positions]
    seen = [
        table[start // page_size : (end - 1) // page_size + 1]
        for start, end in zip(starts, ends, strict=True)
    ]
    width = max(map(len, seen))
    tables = torch.stack([torch.cat((each, each[-1:].repeat(width - len(each)))) for each in seen])
    longest = max(end - start for start, end in zip(starts, ends, strict=True))
    made = [torch.tensor(each) for each in (starts, first, ends)]
    reads = DecodeReads(tables, made[0], made[1], made[2], longest, max(starts) > 0)
    return decode_attention(context.query[positions], cache, reads, SCORING, context.sinks)


@pytest.mark.parametrize("window", [None, 7, 60, 300])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 8), (14, 2, 80)])
def test_attention(shape: Shape, window: int | None, dtype: torch.dtype) -> None:
    assert_attention_is_as_alone(shape, window, dtype)


@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES[1:])
def test_attention_over_codes(kv_dtype: KvDtype, window: int | None, dtype: torch.dtype) -> None:
    assert_attention_is_as_alone((9, 3, 64), window, dtype, kv_dtype)


def assert_attention_is_as_alone(
    shape: Shape, window: int | None, dtype: torch.dtype, kv_dtype: KvDtype = "auto"
) -> None:
    context = Context(shape, dtype, kv_dtype)
    wanted = context.whole(window)
    assert wanted.isfinite().all()
    source = random.Random(0)
    for page_size, most in ((16, 1), (1, 9), (5, 300)):
        cache, table = context.pages(page_size)
        position = source.randrange(context.length // 2) if most == 1 else 0
        for _ in range(25):
            torch.set_num_threads(source.randrange(1, 4))
            end = min(context.length, position + source.randrange(1, most + 1))
            first = 0 if window is None else max(0, position - window + 1)
            start = first // page_size * page_size
            pages = table[start // page_size : (end - 1) // page_size + 1]
            reads = ChunkReads(pages, start, position, end, window)
            rows = context.query[position:end]
            found = chunk_attention(rows, cache, reads, SCORING, context.sinks)
            assert torch.equal(found, wanted[position:end]), (page_size, position, end)
            position = end % context.length
        for batch in (1, 2, 33):
            positions = [source.randrange(context.length) for _ in range(batch)]
            found = decoded(context, page_size, positions, window)
            assert torch.equal(found, wanted[positions]), (page_size, positions)


class Steps:
    """A model over pages of one size, with sequences of its own tokens."""

    def __init__(
        self, model: Model, page_size: int, dtype: torch.dtype, kv_dtype: KvDtype = "auto"
    ) -> None:
        shape = model.architecture
        self._model, self._page_size = model, page_size
        size = stored_shape(shape.pages_shape(900, page_size), kv_dtype, "cpu")
        self._tables = len(shape.slices.windows)
        self._runner = Runner(model, torch.zeros(size, dtype=stored_dtype(kv_dtype, dtype)))
        self._pages = random.Random(page_size).sample(range(900), 900)

    @property
    def recordings(self) -> int:
        return len(self._runner.recorded._steps)

    def chunk(self, sequence: int, start: int, end: int) -> ChunkInputs:
        tokens = [(3 + 5 * at + sequence * at * at) % 90 for at in range(start, end)]
        each = -(-100 // self._page_size)
        tables = [
            self._pages[at * each : (at + 1) * each]
            for at in range(sequence * self._tables, (sequence + 1) * self._tables)
        ]
        return ChunkInputs(start, tokens, tables, list(range(start, end)))

    @torch.inference_mode()
    def logits(self, *chunks: ChunkInputs) -> list[Tensor]:
        """Of every token, by chunk. Single tokens must come first."""
        found = self._model.logits(self._runner._forward(list(chunks)))
        return list(found.split([len(chunk.tokens) for chunk in chunks]))


@pytest.mark.usefixtures("_wide")
def test_vectors_of_other_cpus(dtype: torch.dtype) -> None:
    test_products(64, 70, dtype)
    test_gated_products(dtype)
    for kv_dtype in KV_DTYPES:
        test_rotation_and_norms_of_heads(dtype, kv_dtype)
        assert_attention_is_as_alone((6, 2, 48), 60, dtype, kv_dtype)


@pytest.mark.parametrize(
    ("shape", "window"), [((9, 3, 64), None), ((4, 4, 32), 60), ((20, 1, 96), 300)]
)
def test_attention_on_tile_registers(
    shape: Shape, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with emulated_tiles(monkeypatch):
        for kv_dtype in KV_DTYPES:
            assert_attention_is_as_alone(shape, window, torch.bfloat16, kv_dtype)


def test_products_on_tile_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_tiles(monkeypatch):
        test_products(64, 70, torch.bfloat16)
        test_gated_products(torch.bfloat16)


@pytest.mark.skipif(not compiler.has_amx(), reason="needs AMX")
def test_tile_registers_are_as_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context((9, 3, 64), torch.bfloat16)
    found = context.whole(None)
    with emulated_tiles(monkeypatch):
        assert torch.equal(context.whole(None), found)


MODELS = ["llama-biases", "llama-tied-mqa", "mistral-window", "qwen3", "granite", "olmo2"]
MODELS += ["phi3-long", "gemma2", "gemma3", "qwen2-moe", "qwen3-moe", "dots1", "gpt-oss"]
MODELS += ["deepseek-v2-lite", "deepseek-v3"]


@pytest.mark.parametrize("name", MODELS)
def test_whole_models(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    assert_steps_are_as_alone(name, dtype, tmp_path)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES[1:])
@pytest.mark.parametrize("name", ["llama-head-dim", "gemma3", "gpt-oss"])
def test_whole_models_over_codes(
    name: str, kv_dtype: KvDtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    assert_steps_are_as_alone(name, dtype, tmp_path, kv_dtype)


def assert_steps_are_as_alone(
    name: str, dtype: torch.dtype, folder: Path, kv_dtype: KvDtype = "auto"
) -> None:
    save(TINY_MODELS[name], folder)
    model = load_model(Checkpoint(folder), read_architecture(folder), dtype, "cpu")
    steps = Steps(model, 16, dtype, kv_dtype)
    (wanted,) = steps.logits(steps.chunk(1, 0, PROMPT))
    for page_size, size in ((16, 1), (4, 7), (8, 33), (16, 64)):
        steps = Steps(model, page_size, dtype, kv_dtype)
        for start, end in pairwise([*cuts(size), PROMPT]):
            torch.set_num_threads(1 + start % 3)
            mine = steps.chunk(1, start, end)
            others = [steps.chunk(2 + each, 0, 1) for each in range(start % 5)]
            plan = [*others, mine, steps.chunk(0, 0, 2 + start % 50)]
            found = steps.logits(*plan)[len(others)]
            assert torch.equal(found, wanted[mine.start : mine.end]), (page_size, size, start)


def cuts(size: int) -> list[int]:
    """Where a prompt's chunks begin; single tokens follow a long one."""
    return [0, *range(PROMPT - 20, PROMPT)] if size == 1 else list(range(0, PROMPT, size))


RECORDED = ["llama-tied-mqa", "mistral-window", "gemma3", "phi3-long", "granite"]


@pytest.mark.parametrize("name", [*RECORDED, "llama-biases", "qwen3-moe"])
def test_steps_that_only_decode_are_recorded_with_the_same_bits(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Not those with operations of torch between the products: of experts, or that add a bias to
    the residual."""
    save(TINY_MODELS[name], tmp_path)
    model = load_model(Checkpoint(tmp_path), read_architecture(tmp_path), dtype, "cpu")
    steps = Steps(model, 4, dtype)
    wanted = [steps.logits(steps.chunk(each, 0, PROMPT))[0] for each in range(3)]
    torch.set_num_threads(2)
    steps = Steps(model, 4, dtype)
    for at in range(PROMPT):
        rows = [steps.chunk(each, at, at + 1) for each in range(1 + at // 5 % 3)]
        for each in range(len(rows), 3):
            steps.logits(steps.chunk(each, at, at + 1))
        for found, of_prompt in zip(steps.logits(*rows), wanted, strict=False):
            assert torch.equal(found[0], of_prompt[at]), at
    assert bool(steps.recordings) == (name in RECORDED)

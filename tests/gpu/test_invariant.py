"""A row has the same bits alone and in any company: logits, keys and values, bit for bit.

Each case is compared with prompts that were computed alone, in one chunk, and decoded alone.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pools import CUDA
from random_shapes import CONTEXT, SHAPES, VOCABULARY
from torch import Tensor

from baton.core.types import AttemptKey, Sampling, Work
from baton.engine.architecture import parse_architecture
from baton.engine.empty_pages import stored_dtype
from baton.engine.gpu.numerics import Numerics
from baton.engine.gpu.runner import GpuRunner
from baton.engine.model import Model
from baton.engine.model_choice import KvDtype, WeightQuantization, stored_shape
from baton.engine.page_groups import make_pool
from baton.engine.random_tensors import RandomTensors
from baton.engine.sequence import Sequence
from baton.engine.step import Checked, Plan, token_and_logprobs
from baton.engine.weights import load_model
from baton.kernels.experts import MLP
from baton.kernels.fp8 import quantize_to_fp8
from baton.kernels.gpu.fp8_rows import Fp8Sums, library_product, library_sums
from baton.kernels.gpu.linear import few_rows, few_rows_alone, few_rows_onto
from baton.kernels.gpu.norm import scale_rows
from baton.kernels.gpu.tilings import FP8_TILE_ROWS, MOST_ROWS
from baton.kernels.packed import PackedWeight

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")

BATCH, TOKENS = 256, 80_000
LENGTHS = (1, 5, 31, 63, 64, 65, 127, 200, 255, 256, 257, 300, 513, 700, 1030, 2100)
ANSWER = 4


def model_of(
    name: str,
    folder: Path,
    dtype: torch.dtype,
    quantization: WeightQuantization = "none",
    kv_dtype: KvDtype = "auto",
) -> Model:
    path = folder / "config.json"
    path.write_text(json.dumps(SHAPES[name]))
    torch.manual_seed(1)
    shape = parse_architecture(path)
    return load_model(
        RandomTensors("cuda"),
        shape,
        dtype,
        "cuda",
        quantization=quantization,
        balanced=kv_dtype != "auto",
    )


Logits = dict[tuple[int, int], Tensor]
"""By prompt and position."""


class Engine:
    """A runner whose logits are kept."""

    def __init__(
        self,
        model: Model,
        page_size: int = 16,
        chunk_tokens: int = 8192,
        kv_dtype: KvDtype = "auto",
    ) -> None:
        shape = model.architecture
        slices = shape.slices
        pages = TOKENS // page_size * len(slices.windows)
        size = stored_shape(shape.pages_shape(pages, page_size), kv_dtype, "cuda")
        stored = stored_dtype(kv_dtype, model.embedding.dtype)
        self.kv = torch.zeros(size, dtype=stored, device="cuda")
        self.pool = make_pool(pages, page_size, slices.windows)
        self.runner = GpuRunner(
            model, self.kv, CONTEXT, BATCH, None, Numerics.INVARIANT, chunk_tokens, guesses=True
        )
        self.runner.record()
        self.logits: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self.answers: dict[int, list[int]] = {}  # by prompt
        self.guesses = False  # whether they are guessed
        sampler = self.runner._sampler
        sample = sampler.sample

        def keep(logits: Tensor, sequences: list[Sequence]) -> Tensor:
            for row, each in zip(logits.clone(), sequences, strict=True):
                place = len(each.tokens) + each.expected
                self.logits[int(each.work.key.request_id), place].append(row)
            return sample(logits, sequences)

        sampler.sample = keep  # type: ignore[method-assign]

    def submit(self, prompt: int) -> Sequence:
        tokens = random.Random(prompt).choices(range(VOCABULARY), k=LENGTHS[prompt])
        work = Work(AttemptKey(str(prompt), 0), tokens, Sampling(), ANSWER, frozenset())
        pages = self.pool.pages_for(len(tokens) + ANSWER)
        lease = self.pool.acquire(pages)
        lease.cover(pages)
        return Sequence(work, lease)

    def step(self, plan: Plan) -> None:
        for sequence, outcome in zip(plan, self.runner.launch(plan).wait(), strict=True):
            if isinstance(outcome, Checked):
                assert len(outcome.drawn) == 1 + outcome.guesses
                sequence.append(*(token_and_logprobs(drawn)[0] for drawn in outcome.drawn))
            if isinstance(outcome, int):
                sequence.append(outcome)

    def guess(self, sequences: list[Sequence]) -> None:
        for each in sequences:
            if self.guesses and each.uncomputed == 1 and each.generated:
                answer = self.answers[int(each.work.key.request_id)]
                each.guesses = answer[each.generated : ANSWER - 1]

    def finish(self, sequences: list[Sequence], chunk: int = CONTEXT, budget: int = 8192) -> None:
        """Prompts in chunks of this size, several in a step; answers as they become ready."""
        while left := [each for each in sequences if each.generated < ANSWER]:
            plan: Plan = {}
            for each in left:
                if count := min(chunk, each.uncomputed, budget - sum(plan.values())):
                    plan[each] = count
            self.guess(left)
            self.step(plan)


def kept(engine: Engine, sequences: list[Sequence]) -> dict[int, Tensor]:
    """Each prompt's keys and values [token, layer, k/v, head, dim]; releases the pages."""
    found = {}
    kv = engine.kv.view(torch.uint8) if engine.kv.itemsize == 1 else engine.kv
    for each in sequences:
        tables = [kv[table].permute(0, 3, 1, 2, 4, 5) for table in each.lease.tables]
        tokens = torch.cat([table.flatten(0, 1) for table in tables], dim=1)
        found[int(each.work.key.request_id)] = tokens[: each.computed].clone()
        each.lease.release()
    return found


def differing(
    engine: Engine, wanted: Logits, found: dict[int, Tensor], memory: dict[int, Tensor]
) -> list[str]:
    wrong = []
    for place, rows in engine.logits.items():
        wrong += [f"logits {place}" for row in rows if not torch.equal(row, wanted[place])]
    for prompt, tokens in found.items():
        same = (tokens == memory[prompt]).flatten(2).all(dim=2)  # [token, layer]
        if not same.all():
            token = int(same.all(dim=1).int().argmin())
            layer = int(same[token].int().argmin())
            wrong.append(f"memory of {LENGTHS[prompt]} from token {token}, layer {layer}")
    return sorted(set(wrong))


Case = Callable[[Engine], list[Sequence]]


def in_chunks(size: int) -> Case:
    def run(engine: Engine) -> list[Sequence]:
        prompts = [prompt for prompt in range(len(LENGTHS)) if size > 10 or LENGTHS[prompt] <= 300]
        sequences = [engine.submit(prompt) for prompt in prompts]
        for each in sequences:
            engine.finish([each], size)
        return sequences

    return run


def at_once(copies: int, chunk: int = CONTEXT) -> Case:
    def run(engine: Engine) -> list[Sequence]:
        short = [prompt for prompt in range(len(LENGTHS)) if LENGTHS[prompt] <= 300]
        prompts = [*range(len(LENGTHS)), *(short * copies)][:BATCH]
        sequences = [engine.submit(prompt) for prompt in prompts]
        engine.finish(sequences, chunk)
        return sequences

    return run


def with_guesses(copies: int, chunk: int = CONTEXT) -> Case:
    """All of them right: what comes behind a wrong one is of another text."""

    def run(engine: Engine) -> list[Sequence]:
        engine.guesses = True
        sequences = at_once(copies, chunk)(engine)
        engine.guesses = False
        return sequences

    return run


CASES = {
    **{f"chunks of {size}": in_chunks(size) for size in (1, 7, 16, 33, 64, 100, 256, 520, 600)},
    "all at once": at_once(0),
    "all at once, in chunks of 50": at_once(0, 50),
    "70 at once": at_once(5),
    "136 at once": at_once(10),
    "256 at once": at_once(20),
    "guesses, beside chunks of 50": with_guesses(0, 50),
    "70 with guesses": with_guesses(5),
    "136 with guesses": with_guesses(10),
}


@pytest.mark.parametrize(
    ("name", "dtype", "quantization", "kv_dtype"),
    [
        *((name, torch.bfloat16, "none", "auto") for name in SHAPES),
        ("small", torch.float16, "none", "auto"),
        *((name, torch.bfloat16, "fp8", "auto") for name in ("llama-8b", "qwen2", "olmo2")),
        ("gemma2", torch.bfloat16, "fp8", "fp8"),
        *((name, torch.bfloat16, "int4", "auto") for name in ("llama-8b", "qwen2", "olmo2")),
        ("small", torch.float16, "int4", "auto"),
        ("llama-8b", torch.bfloat16, "int8", "auto"),
        ("gemma2", torch.bfloat16, "int8", "int8"),
        *((name, torch.bfloat16, "none", "int8") for name in ("small", "llama-8b", "gpt-oss")),
        *((name, torch.bfloat16, "none", "int4") for name in ("small", "llama-8b", "gpt-oss")),
        ("phi3", torch.bfloat16, "none", "int4"),
        *((name, torch.bfloat16, "none", "fp8") for name in ("llama-8b", "qwen3-moe", "gemma3")),
    ],
)
def test_bits_do_not_depend_on_company(
    name: str,
    dtype: torch.dtype,
    quantization: WeightQuantization,
    kv_dtype: KvDtype,
    tmp_path: Path,
) -> None:
    model = model_of(name, tmp_path, dtype, quantization, kv_dtype)
    engine = Engine(model, kv_dtype=kv_dtype)
    sequences = [engine.submit(prompt) for prompt in range(len(LENGTHS))]
    for each in sequences:
        engine.finish([each])
    wanted = {place: rows[0] for place, rows in engine.logits.items()}
    engine.answers = {
        int(each.work.key.request_id): each.tokens[each.prompt_length :] for each in sequences
    }
    memory = kept(engine, sequences)
    assert all(rows.isfinite().all() for rows in wanted.values())
    wrong: dict[str, list[str]] = {}
    for case, run in CASES.items():
        engine.logits.clear()
        found = kept(engine, run(engine))
        if differ := differing(engine, wanted, found, memory):
            wrong[case] = differ[-6:]
    others = {
        "pages of 5": (Engine(model, page_size=5, kv_dtype=kv_dtype), at_once(5, 50)),
        "long chunks not recorded": (
            Engine(model, chunk_tokens=512, kv_dtype=kv_dtype),
            in_chunks(600),
        ),
    }
    for case, (engine, run) in others.items():
        found = kept(engine, run(engine))
        if differ := differing(engine, wanted, found, memory):
            wrong[case] = differ[-6:]
    assert not wrong, "\n".join(f"{case}: {differ}" for case, differ in wrong.items())


@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama-8b", torch.bfloat16), ("qwen2", torch.bfloat16), ("small", torch.float16)],
)
def test_packed_weights_have_the_bits_of_what_they_stand_for(
    name: str, dtype: torch.dtype, quantization: WeightQuantization, tmp_path: Path
) -> None:
    model = model_of(name, tmp_path, dtype, quantization)
    packed = Engine(model)
    for case in (in_chunks(100), at_once(10)):
        kept(packed, case(packed))
    wanted = {place: rows[0] for place, rows in packed.logits.items()}
    plain = Engine(decoded_model(model))
    for case in (in_chunks(100), at_once(10)):
        kept(plain, case(plain))
    assert wanted.keys() == plain.logits.keys()
    assert not differing(plain, wanted, {}, {})


def decoded_model(model: Model) -> Model:
    """With plain weights, in place."""
    for layer in model.layers:
        assert isinstance(layer.mlp, MLP)
        for linear in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down):
            assert isinstance(linear.kept, PackedWeight)
            linear.weight, linear._codes = linear.kept.numbers(), None
    return model


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3"])
def test_pages_that_windows_have_passed_are_not_read(name: str, tmp_path: Path) -> None:
    engine = Engine(model_of(name, tmp_path, torch.bfloat16))
    whole = [engine.submit(prompt) for prompt in range(len(LENGTHS))]
    engine.finish(whole)
    wanted = {place: rows[0] for place, rows in engine.logits.items()}
    for each in whole:
        each.lease.release()
    step = engine.step

    def poison(plan: Plan) -> None:
        step(plan)
        for each in plan:
            before = set(each.lease.held)
            each.lease.advance(each.computed)
            engine.kv[list(before.difference(each.lease.held))] = torch.nan

    engine.step = poison  # type: ignore[method-assign]
    for chunk in (50, 600):
        engine.logits.clear()
        engine.kv.zero_()
        sequences = [engine.submit(prompt) for prompt in range(len(LENGTHS))]
        engine.finish(sequences, chunk)
        assert any(-1 in table for each in sequences for table in each.lease.tables)
        for each in sequences:
            each.lease.release()
        for place, rows in engine.logits.items():
            assert all(torch.equal(row, wanted[place]) for row in rows), (chunk, place)


PRODUCTS = [
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (2048, 4096),
    (576, 1536),
    (960, 576),
    (896, 4864),
]
"""Outputs and inputs."""


@pytest.mark.parametrize(("outputs", "inputs"), PRODUCTS)
def test_the_matrix_librarys_products_in_fp8_have_the_bits_of_ours(
    outputs: int, inputs: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(8192, inputs, device="cuda").bfloat16()
    weight = quantize_to_fp8(torch.randn(outputs, inputs, device="cuda") / inputs**0.5)
    residual, norm = torch.randn(8192, outputs, device="cuda").bfloat16(), x.new_ones(outputs)
    alone, onto = few_rows_alone(x, weight), few_rows_alone(x, weight, onto=True)
    ours = residual[:FP8_TILE_ROWS].clone()
    few_rows_onto(x[:FP8_TILE_ROWS], weight, ours, norm, 1e-5)
    for rows in (1, 2, 17, 33, 64, 65, 100, 128):
        assert torch.equal(few_rows_alone(x[:rows], weight), alone[:rows])
        assert torch.equal(few_rows_alone(x[:rows], weight, onto=True), onto[:rows])
    for rows in (1, 17, 33, 64, 65, 128, 129, 250, 257, 512, 1000, 2048, 4096, 8192):
        with Numerics.INVARIANT.library(rows):
            assert torch.equal(library_product(x[:rows], weight, x.dtype), alone[:rows]), rows
            made, scales = library_sums(x[:rows], weight, x.dtype)
        added, summed = residual[:rows].clone(), residual[:rows].clone()
        left = scale_rows(added, norm, 1e-5, made[None], part_scales=scales)
        assert torch.equal(Fp8Sums(made, scales).scaled(), onto[:rows]), rows
        assert torch.equal(left.x, scale_rows(summed, norm, 1e-5, onto[None, :rows]).x), rows
        assert torch.equal(added, summed), rows
        assert torch.equal(added[:FP8_TILE_ROWS], ours[:rows]), rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), PRODUCTS)
def test_the_matrix_librarys_products_have_the_bits_of_ours(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, residual = (
        torch.randn(8192, inputs, device="cuda"),
        torch.randn(8192, outputs, device="cuda"),
    )
    weight = (torch.randn(outputs, inputs, device="cuda") / inputs**0.5).to(dtype)
    norm = torch.randn(outputs, device="cuda").to(dtype)
    x, residual = x.to(dtype), residual.to(dtype)
    alone, summed = few_rows_alone(x[:MOST_ROWS], weight), residual[:MOST_ROWS].clone()
    scaled = few_rows_onto(x[:MOST_ROWS], weight, summed, norm, 1e-5)
    head = torch.randn(64, outputs, device="cuda").to(dtype)
    read = few_rows(scaled, head)
    for rows in (1, 2, 3, 8, 17, 31):
        assert torch.equal(few_rows_alone(x[:rows], weight), alone[:rows])
    for rows in (33, 40, 64, 65, 96, 128, 192, 250, 256, 257, 512, 1000, 2048, 4096, 8192):
        with Numerics.INVARIANT.library(rows):
            product = torch.mm(x[:rows], weight.t())
        assert torch.equal(product[:MOST_ROWS], alone), rows
        added = residual[:rows].clone()
        left = scale_rows(added, norm, 1e-5, product[None])
        assert torch.equal(added[:MOST_ROWS], summed), rows
        if dtype is torch.bfloat16:
            assert torch.equal(left.x[:MOST_ROWS], scaled.x), rows
            assert torch.equal(few_rows(left.rows(slice(0, MOST_ROWS)), head), read), rows

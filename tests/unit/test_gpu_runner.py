"""The GPU's runner against the CPU's, kernel for kernel: interpreted here, compiled on a GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_ranks import engine_of, gpu_runner, two_ranks
from speculating import WARM, Knowing, Loop, works
from tiny_models import TINY_MODELS, VOCABULARY, generate_with_transformers, save

from baton.core.page_reach import Window
from baton.core.types import AttemptKey, Sampling, Work
from baton.engine.architecture import parse_architecture, read_architecture
from baton.engine.checkpoint import Checkpoint
from baton.engine.engine import AnyRunner
from baton.engine.gpu.batch import StepArrays, StepMessage, decode_step, encode_step
from baton.engine.gpu.graphs import prompt_rows
from baton.engine.gpu.prompt_attention import LongChunk, is_long
from baton.engine.gpu.runner import GpuRunner
from baton.engine.page_groups import make_pool
from baton.engine.page_pool import PagePool
from baton.engine.runner import Runner
from baton.engine.sequence import Sequence
from baton.engine.step import FinishedStep, InFlightStep
from baton.engine.weights import load_model

pytestmark = pytest.mark.usefixtures("few_programs")

PAGES, PAGE_SIZE = 64, 4
Windows = tuple[Window, ...]
CONFIGS = Path(__file__).parents[2] / "bench" / "configs"


def runner_for(folder: Path, device: torch.device | None, pages: int = PAGES) -> AnyRunner:
    """The CPU's runner without a device; else the GPU's."""
    if device is not None:
        return gpu_runner(folder, str(device), pages, PAGE_SIZE)
    shape = read_architecture(folder)
    model = load_model(Checkpoint(folder), shape, torch.float32, "cpu")
    size = shape.pages_shape(pages, PAGE_SIZE)
    return Runner(model, torch.zeros(size))


def answers(
    runner: AnyRunner,
    prompts: list[list[int]],
    samplings: list[Sampling],
    count: int,
    chunk: int = 6,
    windows: Windows = (None,),
    pages: int = PAGES,
) -> list[list[int]]:
    """All prompts in chunks and batches of every kind, one step ahead where the runner is."""
    pool = make_pool(pages, PAGE_SIZE, windows)
    sequences = [
        Sequence(
            Work(AttemptKey(str(index), 0), prompt, sampling, count, frozenset()),
            pool.acquire(pool.pages_for(len(prompt) + count)),
        )
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    under_way: list[tuple[dict[Sequence, int], InFlightStep]] = []
    joined = 1
    while any(each.generated < count for each in sequences):
        plan = {
            each: min(chunk, each.uncomputed)
            for each in sequences[:joined]
            if each.generated < count and not each.planned_out
        }
        joined += 1
        for sequence, tokens in plan.items():
            sequence.lease.cover(pool.pages_for(sequence.computed + tokens))
        if plan:
            step = runner.launch(plan)
            under_way.append(({sequence: sequence.computed for sequence in plan}, step))
        ahead = plan and not isinstance(under_way[-1][1], FinishedStep)
        while len(under_way) > (1 if ahead else 0):
            settled, flight = under_way.pop(0)
            for sequence, token in zip(settled, flight.wait(), strict=True):
                sequence.lease.advance(settled[sequence])
                if isinstance(token, int):
                    sequence.append(token)
    for each in sequences:
        each.lease.release()
    assert pool.free == pool.total
    return [each.tokens[each.prompt_length :] for each in sequences]


def test_a_gpu_answers_as_a_cpu_does(device: torch.device, tmp_path: Path) -> None:
    save(TINY_MODELS["llama-biases"].changed(num_hidden_layers=2), tmp_path)
    source = random.Random(1)
    prompts = [[source.randrange(VOCABULARY) for _ in range(length)] for length in (9, 1, 3, 2)]
    samplings = [
        Sampling(),
        Sampling(temperature=0.9, top_k=30, top_p=0.9, seed=5),
        Sampling(repetition_penalty=1.3, logit_bias=((7, 1.0),)),
        Sampling(temperature=1.2, seed=2, logit_bias=((3, 4.0), (9, -100.0))),
    ]
    wanted = answers(runner_for(tmp_path, None), prompts, samplings, 4)
    assert answers(runner_for(tmp_path, device), prompts, samplings, 4) == wanted


@pytest.mark.parametrize(
    "name",
    ["mixtral", "qwen2-moe", "dots1", "gpt-oss", "deepseek-v2-lite", "deepseek-v3"],
)
def test_a_gpu_answers_as_transformers_does(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    oracle = save(TINY_MODELS[name].changed(num_hidden_layers=2), tmp_path)
    source = random.Random(4)
    prompts = [[source.randrange(VOCABULARY) for _ in range(length)] for length in (7, 1)]
    wanted = [generate_with_transformers(oracle, prompt, 3) for prompt in prompts]
    runner, windows = runner_for(tmp_path, device), read_architecture(tmp_path).slices.windows
    assert answers(runner, prompts, [Sampling()] * 2, 3, windows=windows) == wanted


@pytest.mark.parametrize("name", ["llama-biases", "olmo2", "qwen2-moe", "gpt-oss"])
def test_two_ranks_of_a_gpu_answer_as_a_cpu_does(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    save(TINY_MODELS[name].changed(num_hidden_layers=2), tmp_path / "model")
    source = random.Random(3)
    prompts = [[source.randrange(VOCABULARY) for _ in range(length)] for length in (9, 2)]
    samplings = [Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=5)]
    windows = read_architecture(tmp_path / "model").slices.windows
    wanted = answers(runner_for(tmp_path / "model", None), prompts, samplings, 3, windows=windows)
    with two_ranks(tmp_path / "model", str(device), PAGES, PAGE_SIZE, tmp_path) as runner:
        assert answers(runner, prompts, samplings, 3, windows=windows) == wanted


def test_a_step_of_a_gpu_reads_back_as_it_was_sent() -> None:
    rows = [np.arange(3, dtype=np.int32) + start for start in (-1, 4, 8, 12)]
    blocks = np.array([[1, 0, 2, 5]], dtype=np.int32)
    adapters = np.array([2, -1, 0], dtype=np.int32)
    long = [LongChunk(0, 600, 512, 3), LongChunk(600, 513, 0, 4)]
    sent = StepMessage(
        StepArrays(
            np.stack(rows), blocks=blocks, long=long, decoding=1, guesses=True, adapters=adapters
        ),
        pages=np.array([[7, 8], [9, 10]], dtype=np.int32),
        wanted=np.array([2], dtype=np.int32),
    )
    found = decode_step(encode_step(sent))
    assert np.array_equal(found.arrays.joined(), sent.arrays.joined())
    assert (found.arrays.long, found.arrays.decoding) == (long, 1)
    assert found.arrays.blocks.shape == (1, 4)
    assert found.pages.tolist() == [[7, 8], [9, 10]]
    assert found.wanted.tolist() == [2]
    assert found.arrays.adapters is not None
    assert found.arrays.adapters.tolist() == [2, -1, 0]


@pytest.mark.parametrize(
    ("config", "chunk_tokens", "most"),
    [
        ("llama-3.1-8b", 8192, 512),
        ("qwen3-30b-a3b", 8192, 2048),
        ("qwen3-30b-a3b", 900, 1024),
        ("qwen3-30b-a3b", 512, 512),
    ],
)
def test_long_steps_are_recorded_if_their_layers_are_short(
    config: str, chunk_tokens: int, most: int
) -> None:
    shape = parse_architecture(CONFIGS / f"{config}.json")
    assert prompt_rows(shape, chunk_tokens)[-1] == most


def test_longer_steps_are_recorded_in_fp8() -> None:
    shape = parse_architecture(CONFIGS / "llama-3.1-8b.json")
    assert prompt_rows(shape, 8192)[-1] == 512
    assert prompt_rows(shape, 8192, fp8=True)[-1] == 2048


@pytest.mark.parametrize(
    ("count", "start", "recorded", "long"),
    [
        (512, 30_000, 512, False),
        (513, 0, 512, True),
        (2048, 0, 2048, False),
        (2048, 7000, 2048, True),
        (2049, 0, 2048, True),
    ],
)
def test_chunks_of_recorded_steps_are_short(
    count: int, start: int, recorded: int, long: bool
) -> None:
    assert is_long(count, start, 16, recorded) is long


def test_single_tokens_of_prompts_may_run_among_those_that_decode(
    device: torch.device, tmp_path: Path
) -> None:
    save(TINY_MODELS["qwen3"].changed(num_hidden_layers=2), tmp_path)
    prompts, samplings = [[5], [7, 8, 9]], [Sampling(), Sampling()]
    wanted = answers(runner_for(tmp_path, None), prompts, samplings, 2, chunk=1)
    assert answers(runner_for(tmp_path, device), prompts, samplings, 2, chunk=1) == wanted


def test_a_prompt_goes_on_behind_pages_that_another_sequence_has_filled(
    device: torch.device, tmp_path: Path
) -> None:
    save(TINY_MODELS["llama"].changed(num_hidden_layers=2), tmp_path)
    source = random.Random(2)
    first = [source.randrange(VOCABULARY) for _ in range(9)]
    second = [*first[:8], source.randrange(VOCABULARY), source.randrange(VOCABULARY)]
    wanted = answers(runner_for(tmp_path, None), [first, second], [Sampling()] * 2, 2)
    runner, pool = runner_for(tmp_path, device), PagePool(PAGES, PAGE_SIZE, root=b"root")
    writer = begin(pool, first, 2)
    step(runner, [writer])
    reader = begin(pool, second, 2)
    assert reader.lease.pages[:2] == writer.lease.pages[:2]
    step(runner, [writer, reader])
    writer.lease.release()
    step(runner, [reader])
    assert [writer.tokens[9:], reader.tokens[10:]] == wanted


def begin(pool: PagePool, prompt: list[int], count: int, logprobs: int | None = None) -> Sequence:
    key = AttemptKey(str(len(prompt)), 0)
    work = Work(key, prompt, Sampling(), count, frozenset(), logprobs=logprobs)
    chain = pool.chain("")
    lease = pool.acquire(pool.pages_for(len(prompt) + count), chain.to_find(prompt))
    return Sequence(work, lease, computed=lease.found * PAGE_SIZE, chain=chain)


def step(runner: AnyRunner, sequences: list[Sequence]) -> None:
    """All that is left to compute of each, and what a worker does when that has ended."""
    plan = {each: each.uncomputed for each in sequences}
    for each, token in zip(sequences, runner.launch(plan).wait(), strict=True):
        assert isinstance(token, int)
        each.settle(each.computed)
        each.append(token)


@pytest.mark.parametrize("name", ["granite", "olmo2", "phi3-long", "gemma2", "gemma3"])
def test_a_gpu_runs_each_kind_of_layer_as_a_cpu_does(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    """Multipliers, norms after or of all heads, fused weights and partial rotation, caps, ropes."""
    save(TINY_MODELS[name], tmp_path)
    windows = read_architecture(tmp_path).slices.windows
    source = random.Random(4)
    prompts = [[source.randrange(VOCABULARY) for _ in range(length)] for length in (7, 1)]
    samplings = [Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=5)]
    wanted = answers(runner_for(tmp_path, None), prompts, samplings, 2, windows=windows)
    assert answers(runner_for(tmp_path, device), prompts, samplings, 2, windows=windows) == wanted


@pytest.mark.parametrize(("name", "pages"), [("mistral-window", 12), ("gemma3", 36)])
def test_a_gpu_gives_back_pages_that_windows_have_passed(
    name: str, pages: int, device: torch.device, tmp_path: Path
) -> None:
    """The pool is too small for all pages of the prompts: others use those given back."""
    oracle = save(TINY_MODELS[name].changed(sliding_window=5), tmp_path)
    windows = read_architecture(tmp_path).slices.windows
    source = random.Random(5)
    prompts = [[source.randrange(VOCABULARY) for _ in range(length)] for length in (25, 18)]
    wanted = [generate_with_transformers(oracle, prompt, 3) for prompt in prompts]
    runner, samplings = runner_for(tmp_path, device, pages), [Sampling()] * 2
    assert answers(runner, prompts, samplings, 3, 9, windows, pages) == wanted


def compare_guesses(runner: GpuRunner, folder: Path) -> None:
    """In steps of few rows and of many, beside prompts, and one step ahead."""
    engine = engine_of(runner, folder, PAGES, PAGE_SIZE)
    asked = works([Sampling(), WARM], answer=4)
    asked = [replace(each, prompt_tokens=each.prompt_tokens[:9]) for each in asked]
    plain = Loop(engine).answer(asked)
    guessing = Loop(engine, Knowing(plain, 0.2, VOCABULARY), max_batch=8)
    for alone, together in zip(plain, guessing.answer(asked), strict=True):
        assert together.tokens == alone.tokens
        # Interpreted products are the CPU's, whose last bits depend on the number of rows.
        for one, other in zip(alone.logprobs, together.logprobs, strict=True):
            assert one == other or one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert guessing.accepted


@pytest.mark.parametrize("name", ["llama-biases", "deepseek-v2-lite"])
def test_guesses_on_a_gpu_change_no_answer(name: str, device: torch.device, tmp_path: Path) -> None:
    save(TINY_MODELS[name].changed(num_hidden_layers=2), tmp_path)
    compare_guesses(gpu_runner(tmp_path, str(device), PAGES, PAGE_SIZE), tmp_path)


def test_guesses_of_two_ranks_change_no_answer(device: torch.device, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(TINY_MODELS["llama-biases"].changed(num_hidden_layers=1), folder)
    with two_ranks(folder, str(device), PAGES, PAGE_SIZE, tmp_path) as runner:
        compare_guesses(runner, folder)

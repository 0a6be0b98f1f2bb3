"""A model that several ranks share: its tokens against transformers', and what each rank holds."""

from __future__ import annotations

import multiprocessing
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from engine_loop import answer, load, sequence, serve
from rank_threads import groups, split_engine
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS, VOCABULARY, choices_of_transformers, save
from torch import distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]

from baton.core.errors import InvalidCheckpoint, InvalidConfig
from baton.core.types import AttemptKey, Sampling, Work
from baton.engine.architecture import Architecture, Split, read_architecture
from baton.engine.engine import Engine
from baton.engine.gpu.device import GpuSettings
from baton.engine.sequence import Sequence
from baton.engine.tensor_parallel import Group, NcclGroup, SummedNorms
from baton.kernels.linear import RMSNorm
from baton.worker.rank_process import (
    RankSettings,
    check_ranks,
    rank_devices,
)

ANSWER = 6


def random_prompt(length: int) -> list[int]:
    source = random.Random(length)
    return [source.randrange(VOCABULARY) for _ in range(length)]


PROMPTS = [random_prompt(length) for length in (1, 5, 40, 150)]
# Biases, norms of heads, windows, a tied head, layers without rotation; multipliers, fused weights,
# norms of what ranks have summed, or of all their heads together; experts; latents.
FAMILIES = ["llama-biases", "qwen3-windows", "smollm3", "granite", "phi3-partial", "gemma2"]
FAMILIES += [
    "olmo2",
    "mixtral",
    "qwen2-moe",
    "dots1",
    "gpt-oss",
    "deepseek-v2",
    "deepseek-v3-halves",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_answer_a_mixed_batch_as_transformers_does(name: str, tmp_path: Path) -> None:
    oracle = save(TINY_MODELS[name], tmp_path / "model")
    with split_engine(tmp_path / "model", 2, tmp_path) as split:
        answers = serve(split.engine, PROMPTS, ANSWER, chunk=16)
    assert answers == choices_of_transformers(oracle, PROMPTS, answers)


def test_four_ranks_answer_as_transformers_does(tmp_path: Path) -> None:
    oracle = save(TINY_MODELS["llama"], tmp_path / "model")
    with split_engine(tmp_path / "model", 4, tmp_path, page_size=4) as split:
        answers = serve(split.engine, PROMPTS, ANSWER, chunk=64)
    assert answers == choices_of_transformers(oracle, PROMPTS, answers)


def test_ranks_hold_the_pages_of_the_whole_by_heads(tmp_path: Path) -> None:
    save(TINY_MODELS["qwen3"], tmp_path / "model")
    whole = load(tmp_path / "model")
    with split_engine(tmp_path / "model", 2, tmp_path) as split:
        parts = [split.engine, *split.others]
        for engine in (whole, split.engine):
            # In two steps, of which the first samples nothing.
            running = sequence(engine, PROMPTS[2], 1)
            engine.step({running: 30})
            engine.step({running: 10})
            assert running.lease.pages == [0, 1, 2]
        assert split.engine.pool.total == whole.pool.total
        assert sum(part.kv.nbytes for part in parts) == whole.kv.nbytes
        found = torch.cat([part.kv[:3] for part in parts], dim=4)
        torch.testing.assert_close(found, whole.kv[:3], rtol=1e-4, atol=1e-5)


def test_ranks_hold_the_same_latents(tmp_path: Path) -> None:
    save(TINY_MODELS["deepseek-v3"], tmp_path / "model")
    whole = load(tmp_path / "model")
    with split_engine(tmp_path / "model", 2, tmp_path) as split:
        for engine in (whole, split.engine):
            engine.step({sequence(engine, PROMPTS[2], 1): 40})
        first, other = split.engine.kv[:3], split.others[0].kv[:3]
        assert torch.equal(first, other)
        assert split.engine.pool.total == whole.pool.total // 2
        torch.testing.assert_close(first, whole.kv[:3], rtol=1e-4, atol=1e-5)


def test_prompts_are_scored_as_by_the_whole_model(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path / "model")
    with split_engine(tmp_path / "model", 2, tmp_path) as split:
        found, wanted = _scored(split.engine), _scored(load(tmp_path / "model"))
    assert len(found) == len(PROMPTS[2]) - 1
    assert found == pytest.approx(wanted, abs=1e-4)


def _scored(engine: Engine) -> list[float]:
    work = Work(AttemptKey("test", 0), PROMPTS[2], Sampling(), 1, frozenset(), prompt_logprobs=1)
    running = Sequence(work, engine.pool.acquire(engine.pool.pages_for(len(PROMPTS[2]) + 1)))
    engine.step({running: 25})
    engine.step({running: running.uncomputed})
    return [scores.logprob for scores in running.prompt_scores]


def test_a_drawn_answer_is_that_of_the_whole_model(tmp_path: Path) -> None:
    save(TINY_MODELS["qwen2"], tmp_path / "model")
    with split_engine(tmp_path / "model", 2, tmp_path) as split:
        assert _drawn(split.engine) == _drawn(load(tmp_path / "model"))


def _drawn(engine: Engine) -> list[int]:
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=7)
    work = Work(AttemptKey("test", 0), PROMPTS[1], sampling, ANSWER, frozenset())
    running = Sequence(work, engine.pool.acquire(engine.pool.pages_for(len(PROMPTS[1]) + ANSWER)))
    while running.generated < ANSWER:
        (token,) = engine.step({running: running.uncomputed})
        assert isinstance(token, int)
        running.append(token)
    return running.tokens


@pytest.mark.parametrize("name", ["llama-biases", "dots1", "gpt-oss", "deepseek-v2"])
def test_random_weights_are_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    save(TINY_MODELS[name], tmp_path / "model")
    whole = Engine.load(tmp_path / "model", kv_memory=4 << 20, random_weights=True)
    with split_engine(tmp_path / "model", 2, tmp_path, random_weights=True) as split:
        assert answer(split.engine, PROMPTS[2], ANSWER) == answer(whole, PROMPTS[2], ANSWER)


def test_a_tensor_of_another_shape_is_named_by_a_rank_too(tmp_path: Path) -> None:
    save(TINY_MODELS["llama"], tmp_path)
    file = tmp_path / "model.safetensors"
    weights, name = load_file(file), "model.layers.1.mlp.gate_proj.weight"
    save_file(weights | {name: torch.cat((weights[name], weights[name]))}, file)
    made, _ = groups(2, tmp_path)
    with pytest.raises(InvalidCheckpoint, match=r"\[160, 48\], config.json asks for \[80, 48\]"):
        Engine.load(tmp_path, kv_memory=4 << 20, group=made[1])


def architecture(tmp_path: Path, name: str) -> Architecture:
    models = TINY_MODELS | {
        "odd-experts": TINY_MODELS["qwen3-moe"].changed(moe_intermediate_size=15)
    }
    save(models[name], tmp_path)
    return read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("name", "size", "what"),
    [
        ("llama-tied-mqa", 2, "1 key heads"),
        ("llama", 3, "4 key heads"),
        ("qwen2", 4, "2 key heads"),
        ("odd-experts", 2, "15 columns of an expert"),
    ],
)
def test_what_ranks_cannot_share_evenly_is_refused(
    name: str, size: int, what: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match=f"{size} ranks cannot share the model's {what}"):
        check_ranks(size, architecture(tmp_path, name))


def test_ranks_with_a_part_of_a_gpu_are_refused(tmp_path: Path) -> None:
    model = architecture(tmp_path, "llama")
    check_ranks(1, model, gpu_share=0.5)
    with pytest.raises(InvalidConfig, match="takes its GPUs whole"):
        check_ranks(2, model, gpu_share=0.5)


def test_each_rank_has_a_gpu_of_its_own_unless_they_may_share() -> None:
    assert rank_devices(2, "cpu", 0, may_share=False) == ["cpu", "cpu"]
    assert rank_devices(2, "cuda", 4, may_share=True) == ["cuda:0", "cuda:1"]
    assert rank_devices(4, "cuda", 2, may_share=True) == ["cuda:0", "cuda:1"] * 2
    with pytest.raises(
        InvalidConfig, match="tensor_parallel 2 needs a GPU per rank, and this worker sees 1"
    ):
        rank_devices(2, "cuda", 1, may_share=False)
    with pytest.raises(InvalidConfig, match="sees 0"):
        rank_devices(2, "cuda", 0, may_share=True)


def test_the_settings_of_a_rank_read_back_as_they_were_sent() -> None:
    load = partial(Engine.load, Path("here"), gpu=GpuSettings(memory_share=0.4, max_batch=3))
    settings = RankSettings(
        rank=1,
        size=2,
        device="cuda:1",
        own_devices=True,
        threads=1,
        nice=0,
        transport="auto",
        log_level="info",
        load=load,
        rendezvous="there",
        rows_file=7,
    )
    sent = pickle.loads(pickle.dumps(settings))
    assert replace(sent, load=load) == settings
    assert (sent.load.func, sent.load.args, sent.load.keywords) == (
        load.func,
        load.args,
        load.keywords,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_adds_the_parts_of_all_ranks(dtype: torch.dtype, tmp_path: Path) -> None:
    made, _ = groups(3, tmp_path)

    def add(group: Group) -> torch.Tensor:
        group.connect(torch.device("cpu"))
        return group.sum(torch.full((2, 5), 10.0**group.split.rank, dtype=dtype))

    with ThreadPoolExecutor(3) as pool:
        for total in pool.map(add, made):
            assert torch.equal(total, torch.full((2, 5), 111.0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_all_heads_do_not_depend_on_other_rows(dtype: torch.dtype, tmp_path: Path) -> None:
    made, _ = groups(2, tmp_path)
    source = torch.Generator().manual_seed(1)
    query, key = torch.randn(192, generator=source), torch.randn(64, generator=source)
    rows = torch.randn(33, 384, generator=source).to(dtype)  # by kind: of rank 0, of rank 1
    parts = [part.chunk(2, dim=1) for part in rows.split([192, 64, 128], dim=1)]

    def normalize(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        group.connect(torch.device("cpu"))
        rank = group.split.rank
        weights = query.chunk(2)[rank], key.chunk(2)[rank]
        norms = SummedNorms(*(RMSNorm(weight, 1e-6) for weight in weights), group)
        norms.pack()
        together = torch.cat([part[rank] for part in parts], dim=1)
        alone = together[7:8].clone()
        for each in (together, alone):
            norms.normalize_(each)
        return together, alone

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(normalize, made))
    for together, alone in found:
        assert torch.equal(together[7:8], alone)
    by_rank = [together.split([96, 32, 64], dim=1) for together, _ in found]
    joined = [torch.cat(both, dim=1) for both in zip(*by_rank, strict=True)]
    for weight, part, whole in zip(
        (query, key), joined, (rows[:, :192], rows[:, 192:256]), strict=False
    ):
        torch.testing.assert_close(part, RMSNorm(weight.to(dtype), 1e-6)(whole))
    assert torch.equal(joined[2], rows[:, 256:])


class GlooInPlaceOfNccl(NcclGroup):
    """NCCL's group on CPUs: the same collectives, carried out by gloo."""

    def _open(self, store: FileStore) -> None:
        split = self.split
        distributed.init_process_group("gloo", store=store, rank=split.rank, world_size=split.size)


def summed(rank: int, rendezvous: Path) -> list[torch.Tensor]:
    """Of 1 and of 7 rows: row 0 is the same in both."""
    group = GlooInPlaceOfNccl(Split(rank, 3), rendezvous)
    group.connect(torch.device("cpu"))
    rows = torch.randn(7, 5, generator=torch.Generator().manual_seed(rank)).bfloat16()
    return [group.sum(rows[:1].clone()), group.sum(rows.clone()), rows]


def test_nccls_sum_of_three_parts_is_in_the_order_of_ranks(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        waiting = [pool.apply_async(summed, (rank, tmp_path / "meeting")) for rank in range(3)]
        found = [each.get(timeout=120) for each in waiting]
    parts = [rows for _, _, rows in found]
    wanted = parts[0] + parts[1] + parts[2]
    for alone, together, _ in found:
        assert torch.equal(together, wanted)
        assert torch.equal(alone, wanted[:1])


def test_an_error_of_a_rank_reads_back_as_it_was_sent() -> None:
    found = pickle.loads(pickle.dumps(InvalidCheckpoint("no weights", field="model")))
    assert isinstance(found, InvalidCheckpoint)
    assert (found.message, found.field) == ("no weights", "model")

"""A model that several ranks share, on GPUs.

Two ranks on one GPU, which exchange their sums through host memory: parts of every kernel's
shapes, pools and transfers of their own. And one rank alone with NCCL: sums within recorded
steps. In float32, where a token does not depend on what else is in its batch.
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from engine_loop import serve
from pools import CUDA
from processes import ProcessCluster
from rank_leader import Leader
from tiny_models import TINY_MODELS, VOCABULARY, generate_with_transformers, save
from torch import distributed
from transformers import PreTrainedModel

from baton.core.types import AttemptKey, Sampling, Work
from baton.engine.architecture import Split
from baton.engine.engine import Engine
from baton.engine.gpu.device import GpuSettings
from baton.engine.sequence import Sequence
from baton.engine.tensor_parallel import Group, NcclGroup

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")

DEVICE = "cuda:0"
ANSWER = 16
SMALL = GpuSettings(max_batch=8, chunk_tokens=640)
# The longest is read by steps that are not recorded, of which one samples nothing.
LENGTHS = (1, 9, 40, 150, 600)
SIZES = {"prefill-0": 1, "decode-0": 2, "prefill-1": 2, "decode-1": 1}


def prompts(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    """Biases, and heads of 16."""
    shape = {"max_position_embeddings": 1024, "head_dim": 16}
    return save(TINY_MODELS["llama-biases"].changed(**shape), folder)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Group]:
    """A group of one rank, with a GPU of its own."""
    yield NcclGroup(Split(0, 1), tmp_path / "meeting")
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_sums_are_recorded_and_replayed(alone: Group) -> None:
    alone.connect(torch.device(DEVICE))
    assert alone.recordable
    assert alone.least(7) == 7
    x = torch.ones(4, 64, device=DEVICE, dtype=torch.bfloat16)
    alone.sum(x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        doubled = alone.sum(x * 2) + 1
        alone.share(doubled)
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(doubled, torch.full_like(x, 2 * value + 1))


def test_a_rank_with_nccl_answers_from_recorded_steps_as_transformers_does(
    alone: Group, folder: Path, oracle: PreTrainedModel
) -> None:
    asked = prompts(1)
    expected = [generate_with_transformers(oracle, prompt, ANSWER) for prompt in asked]
    engine = Engine.load(folder, device=DEVICE, kv_memory=16 << 20, gpu=SMALL, group=alone)
    assert alone.recordable
    assert serve(engine, asked, ANSWER, chunk=560) == expected
    assert serve(engine, asked, ANSWER, chunk=32) == expected


def test_two_ranks_that_share_a_gpu_answer_as_transformers_does(
    folder: Path, oracle: PreTrainedModel
) -> None:
    asked = prompts(2)
    expected = [generate_with_transformers(oracle, prompt, ANSWER) for prompt in asked]
    leader = Leader(folder, DEVICE, kv_memory=16 << 20, gpu=SMALL, second_tier=True)
    try:
        engine = leader.load()
        assert engine.kv.shape[4] == 1  # of two key heads
        assert serve(engine, asked, ANSWER, chunk=560) == expected
        assert serve(engine, asked, ANSWER, chunk=32) == expected
        leader.check_rows(engine)
        assert leader.lost.empty()
    finally:
        leader.ranks.close()


LARGE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": None,
}


def test_layers_of_a_large_model_in_bfloat16_score_as_the_whole_does(tmp_path: Path) -> None:
    """Long chunks, which are the library's, then single tokens, which are our products'."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    settings = GpuSettings(max_batch=8, chunk_tokens=1024)
    memory, bfloat = 64 << 20, "bfloat16"
    leader = Leader(tmp_path, DEVICE, bfloat, memory, random_weights=True, gpu=settings)
    try:
        found = scored(leader.load())
    finally:
        leader.ranks.close()
    whole = Engine.load(
        tmp_path,
        dtype=bfloat,
        device=DEVICE,
        kv_memory=memory,
        random_weights=True,
        gpu=settings,
    )
    wanted = scored(whole)
    assert len(found) == 709
    assert found == pytest.approx(wanted, abs=0.1)
    assert sum(abs(a - b) for a, b in zip(found, wanted, strict=True)) / 709 < 0.02


def scored(engine: Engine) -> list[float]:
    """How likely the tokens of a prompt are: 600 in two chunks, then a hundred one by one."""
    draw = random.Random(4)
    prompt = [draw.randrange(4096) for _ in range(710)]
    work = Work(AttemptKey("test", 0), prompt, Sampling(), 1, frozenset(), prompt_logprobs=1)
    running = Sequence(work, engine.pool.acquire(engine.pool.pages_for(len(prompt) + 1)))
    for count in (550, 50, *[1] * 110):
        engine.step({running: count})
    running.lease.release()
    return [scores.logprob for scores in running.prompt_scores]


@pytest.fixture(scope="module")
def cluster(
    folder: Path, oracle: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProcessCluster]:
    pool: dict[str, object] = {"kv_memory": "16MiB", "chunk_tokens": 64}
    pools = {"prefill": pool, "decode": {**pool, "max_batch": 8}}
    tree: dict[str, object] = {
        "dtype": "float32",
        "transport": "cuda_ipc",
        "ranks_share_gpus": True,
        "router": {"policy": "round_robin", "local_prefill": "never"},
        **pools,
    }
    per_worker: dict[str, dict[str, object]] = {
        name: {role: {**pools[role], "tensor_parallel": size}}
        for name, size in SIZES.items()
        for role in [name.partition("-")[0]]
    }
    workspace = tmp_path_factory.mktemp("split-gpu")
    with ProcessCluster(
        folder, workspace, prefill=2, decode=2, tree=tree, per_worker=per_worker
    ) as made:
        yield made


def test_pages_of_split_pools_travel_by_cuda_ipc(
    cluster: ProcessCluster, oracle: PreTrainedModel
) -> None:
    asked = [prompt for seed in (3, 4) for prompt in prompts(seed, (1, 20, 33, 100, 150))]
    assert ask(cluster, oracle, asked) == {(1, 2), (2, 1)}
    # What was asked before is found, and what begins alike.
    ask(cluster, oracle, [*asked, *([*prompt[:33], 7, 7] for prompt in asked)])
    cluster.wait_idle()


def ask(
    cluster: ProcessCluster, oracle: PreTrainedModel, asked: list[list[int]]
) -> set[tuple[int, int]]:
    """Answers like transformers'; the sizes of the pairs that gave them."""
    with cluster.client() as client, ThreadPoolExecutor(len(asked)) as threads:
        answers = list(
            threads.map(
                lambda prompt: client.generate(prompt, max_tokens=ANSWER, timeout=60), asked
            )
        )
    for prompt, answer in zip(asked, answers, strict=True):
        assert list(answer.token_ids) == generate_with_transformers(oracle, prompt, ANSWER)
    return {(SIZES[each.prefill_worker], SIZES[each.decode_worker]) for each in answers}


def test_pages_between_pools_of_the_same_split_travel_whole(
    cluster: ProcessCluster, oracle: PreTrainedModel
) -> None:
    leaving = cluster.workers.pop("decode-1")
    leaving.send(signal.SIGTERM)
    assert leaving.wait() == 0
    assert ask(cluster, oracle, prompts(6, (1, 20, 33, 100))) == {(1, 2), (2, 2)}

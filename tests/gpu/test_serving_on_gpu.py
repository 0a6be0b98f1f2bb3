"""Workers on one GPU: tokens through CUDA IPC, caches and role switches are transformers'."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pools import CUDA
from processes import ProcessCluster
from tiny_models import TINY_MODELS, VOCABULARY, generate_with_transformers, save
from transformers import PreTrainedModel

from baton import AsyncClient
from baton.core import metrics

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")

ANSWER = 40
LENGTHS = (1, 16, 17, 60, 100, 150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    return save(TINY_MODELS["llama-head-dim"], folder)


@pytest.fixture(scope="module")
def cluster(
    folder: Path, oracle: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProcessCluster]:
    tree: dict[str, object] = {
        "prefill": {"kv_memory": "16MiB"},
        "decode": {"kv_memory": "16MiB"},
        "router": {"local_prefill": "never"},
        "drain_seconds": 10.0,
        "speculation": "ngram",
    }
    with ProcessCluster(folder, tmp_path_factory.mktemp("gpu"), decode=2, tree=tree) as made:
        yield made


@pytest.fixture(scope="module")
def expected(oracle: PreTrainedModel) -> dict[tuple[int, ...], list[int]]:
    """What transformers says to each prompt."""
    draw = random.Random(5)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]
    return {tuple(each): generate_with_transformers(oracle, each, ANSWER) for each in prompts}


async def ask_all(client: AsyncClient, expected: dict[tuple[int, ...], list[int]]) -> int:
    """All prompts at once; how many of their tokens were cached."""
    asked = [client.generate(list(each), max_tokens=ANSWER, timeout=60) for each in expected]
    answers = await asyncio.gather(*asked)
    assert [list(each.token_ids) for each in answers] == list(expected.values())
    return sum(each.usage.cached_tokens for each in answers)


async def test_tokens_are_the_same_computed_and_cached(
    cluster: ProcessCluster, expected: dict[tuple[int, ...], list[int]]
) -> None:
    async with AsyncClient(cluster.address) as client:
        await ask_all(client, expected)
        assert await ask_all(client, expected) > 0
    assert cluster.metric("prefill-0", metrics.COMPUTED_TOKENS) > 0
    cluster.wait_idle()


async def test_tokens_are_the_same_while_a_worker_changes_its_role(
    cluster: ProcessCluster, expected: dict[tuple[int, ...], list[int]]
) -> None:
    async with AsyncClient(cluster.address) as client:
        stop = asyncio.Event()

        async def load() -> int:
            rounds = 0
            while not stop.is_set():
                await ask_all(client, expected)
                rounds += 1
            return rounds

        loading = [asyncio.create_task(load()) for _ in range(3)]
        for role in ("prefill", "decode") * 4:
            done = await client.switch_role("decode-1", role)
            print(f"{role}: {done.switch_seconds:.3f} s beyond the drain")
            await asyncio.sleep(0.3)
        stop.set()
        assert min(await asyncio.gather(*loading)) > 0
    cluster.wait_idle()


async def test_a_prompts_probabilities_are_transformers(
    cluster: ProcessCluster, oracle: PreTrainedModel
) -> None:
    prompt = [7, 3, 19, 44, 5, 88, 120, 6, 9, 31] * 9
    async with AsyncClient(cluster.address) as client:
        answer = await client.generate(prompt, max_tokens=1, prompt_logprobs=2)
    with torch.no_grad():
        wanted = oracle(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(dim=-1)
    told = [each.chosen.logprob for each in answer.prompt_logprobs]
    right = [float(wanted[place, token]) for place, token in enumerate(prompt[1:])]
    assert told == pytest.approx(right, abs=1e-4)
    cluster.wait_idle()


async def test_embeddings_are_transformers(
    cluster: ProcessCluster, oracle: PreTrainedModel
) -> None:
    draw = random.Random(6)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]
    with torch.no_grad():
        rows = [oracle.model(torch.tensor([each])).last_hidden_state[0] for each in prompts]
    async with AsyncClient(cluster.address) as client:
        for pooling, right in (
            ("last", [each[-1] for each in rows]),
            ("mean", [each.double().mean(0) for each in rows]),
        ):
            for _ in range(2):  # the second time, pages are cached
                found = await client.embed(prompts, pooling=pooling, normalize=False)
                for vector, wanted in zip(found, right, strict=True):
                    difference = torch.tensor(vector, dtype=wanted.dtype) - wanted
                    assert difference.norm() <= 1e-5 * wanted.norm()
    cluster.wait_idle()

"""Models that run through transformers, on a GPU: their tokens are transformers' there."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from engine_loop import serve
from foreign_models import FOREIGN_MODELS
from pools import CUDA
from processes import ProcessCluster
from tiny_models import TINY_MODELS, VOCABULARY, generate_with_transformers, save
from transformers import PreTrainedModel

from baton import AsyncClient
from baton.engine.engine import Engine
from baton.engine.gpu.device import GpuSettings

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")

ANSWER = 24


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(VOCABULARY) for _ in range(n)] for n in (1, 5, 23, 40, 150)]


def oracle_on_gpu(name: str, folder: Path) -> PreTrainedModel:
    oracle: PreTrainedModel = save((FOREIGN_MODELS | TINY_MODELS)[name], folder).to("cuda")
    return oracle


async def answers(client: AsyncClient) -> list[list[int]]:
    """To all prompts at once."""
    asked = [client.generate(each, max_tokens=ANSWER, timeout=60) for each in prompts()]
    return [list(each.token_ids) for each in await asyncio.gather(*asked)]


@pytest.mark.parametrize("name", ["gpt2", "cohere2", "gpt-oss"])
def test_a_mixed_batch_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    oracle = oracle_on_gpu(name, tmp_path)
    expected = [generate_with_transformers(oracle, prompt, ANSWER) for prompt in prompts()]
    engine = Engine.load(
        tmp_path,
        device="cuda",
        kv_memory=0,  # what the weights leave
        gpu=GpuSettings(memory_share=0.05),
        engine="transformers",
    )
    for chunk in (7, 200):
        assert serve(engine, prompts(), ANSWER, chunk) == expected, chunk
    assert engine.pool.free == engine.pool.total


async def test_a_cluster_answers_as_transformers_does_also_after_a_role_switch(
    tmp_path: Path,
) -> None:
    oracle = oracle_on_gpu("starcoder2", tmp_path / "model")
    expected = [generate_with_transformers(oracle, prompt, ANSWER) for prompt in prompts()]
    pool = {"kv_memory": "16MiB", "chunk_tokens": 16}
    tree: dict[str, object] = {
        "dtype": "float32",
        "prefill": pool,
        "decode": pool,
        "router": {"local_prefill": "never"},
    }
    with ProcessCluster(tmp_path / "model", tmp_path, decode=2, tree=tree) as cluster:
        async with AsyncClient(cluster.address) as client:
            assert await answers(client) == expected
            for role in ("prefill", "decode"):
                await client.switch_role("decode-1", role)
                assert await answers(client) == expected, role
        cluster.wait_idle()

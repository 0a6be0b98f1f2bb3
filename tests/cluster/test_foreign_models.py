"""Models that run through transformers, in router, prefill, NIXL and decode processes."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from foreign_models import FOREIGN_MODELS
from processes import ProcessCluster
from streams import begin
from tiny_models import VOCABULARY, choices_of_transformers, save

from baton import AsyncClient

ANSWER, LONG_ANSWER = 10, 90
TREE: dict[str, object] = {
    "page_size": 4,
    "prefill": {"kv_memory": "4MiB", "chunk_tokens": 16, "threads": 1},
    "decode": {"kv_memory": "4MiB", "threads": 1},
}


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(VOCABULARY) for _ in range(n)] for n in (1, 15, 16, 40, 100)]


def ask(cluster: ProcessCluster, asked: list[list[int]]) -> list[list[int]]:
    """All prompts at once."""
    with cluster.client() as client, ThreadPoolExecutor(len(asked)) as threads:
        answers = threads.map(lambda p: client.generate(p, max_tokens=ANSWER, timeout=120), asked)
        return [list(answer.token_ids) for answer in answers]


async def test_answers_equal_transformers_also_from_cached_pages_and_after_a_death(
    tmp_path: Path,
) -> None:
    oracle = save(FOREIGN_MODELS["starcoder2"], tmp_path / "model")
    asked = prompts()
    with ProcessCluster(tmp_path / "model", tmp_path, decode=2, tree=TREE) as cluster:
        answers = await asyncio.to_thread(ask, cluster, asked)
        assert {len(answer) for answer in answers} == {ANSWER}
        assert answers == choices_of_transformers(oracle, asked, answers)
        assert await asyncio.to_thread(ask, cluster, asked) == answers  # from cached pages
        cluster.wait_idle()
        async with AsyncClient(cluster.address) as client:
            stream, name = await begin(client, asked[3], max_tokens=LONG_ANSWER, ignore_eos=True)
            cluster.workers.pop(name).kill()
            answer = await stream.read()
            long = list(answer.token_ids)
            assert len(long) == LONG_ANSWER
            assert [long] == choices_of_transformers(oracle, asked[3:4], [long])
            assert len(answer.placements) == 2
        assert "starcoder2 runs through transformers" in cluster.workers["prefill-0"].log

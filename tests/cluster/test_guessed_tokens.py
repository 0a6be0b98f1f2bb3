"""Answers of a cluster that guesses tokens equal those of one that does not, whatever happens."""

from __future__ import annotations

import asyncio
from pathlib import Path

from openai import OpenAI
from processes import ProcessCluster
from tiny_models import TINY_MODELS, save
from waiting import until

from baton import Answer, AsyncClient
from baton.core import metrics

PROMPTS = [[3, 4, 5, 6] * 8, [9] * 40, list(range(20, 60)), [7, 8] * 30]
OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 4, "logit_bias": {5: 6.0, 6: 5.0}},
    {"temperature": 0.7, "seed": 1, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 0.0, "stop_token_ids": [11, 12]},
]
TOKENS = 72


def tree(speculation: str) -> dict[str, object]:
    return {
        "speculation": speculation,
        "page_size": 4,
        "prefill": {"kv_memory": "4MiB", "threads": 1},
        "decode": {"kv_memory": "4MiB", "threads": 1},
    }


async def ask_all(client: AsyncClient) -> list[Answer]:
    """Each prompt in each way, all at once."""
    asked = [
        client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, **options)
        for prompt in PROMPTS
        for options in OPTIONS
    ]
    return list(await asyncio.gather(*asked))


def contents(answers: list[Answer]) -> list[tuple[object, ...]]:
    return [(each.token_ids, each.logprobs, each.finish_reason) for each in answers]


async def test_answers_with_and_without_guesses_are_the_same(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save(TINY_MODELS["qwen3"], model)  # which repeats itself
    with ProcessCluster(model, tmp_path / "off", tree=tree("off")) as plain:
        async with AsyncClient(plain.address) as client:
            expected = contents(await ask_all(client))
    with ProcessCluster(model, tmp_path / "on", decode=2, tree=tree("auto")) as cluster:
        await asyncio.to_thread(check_openai, cluster)
        async with AsyncClient(cluster.address) as client:
            assert contents(await ask_all(client)) == expected
            assert contents(await ask_all(client)) == expected, "with cached prefixes"
            running = asyncio.create_task(ask_all(client))
            await until(lambda: is_decoding(client))
            cluster.workers.pop("decode-1").kill()
            migrated = await running
            assert contents(migrated) == expected, "across a migration"
            assert any(len(each.placements) > 1 for each in migrated)
            await until(lambda: reports_guesses(client, cluster))


async def is_decoding(client: AsyncClient) -> bool:
    workers = (await client.status()).workers
    return any(each.load.running for each in workers if each.member.worker_id == "decode-1")


async def reports_guesses(client: AsyncClient, cluster: ProcessCluster) -> bool:
    """Whether the worker's status has what its metrics say."""
    workers = {each.member.worker_id: each.load for each in (await client.status()).workers}
    load, names = workers["decode-0"], (metrics.GUESSED_TOKENS, metrics.ACCEPTED_TOKENS)
    counts = [cluster.metric("decode-0", name) for name in names]
    return [load.guessed_tokens, load.accepted_tokens] == counts


def check_openai(cluster: ProcessCluster) -> None:
    """The first request is guessed on any machine: what a step costs is not measured yet."""
    with OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        done = client.completions.create(
            model=model, prompt=PROMPTS[1], max_tokens=TOKENS, temperature=0.0
        )
    assert done.usage is not None
    details = done.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) + (details.rejected_prediction_tokens or 0)
    assert (details.accepted_prediction_tokens or 0) < TOKENS

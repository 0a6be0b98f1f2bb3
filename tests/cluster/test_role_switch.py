"""A worker changes its role, in its process, while others' streams run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
from processes import ProcessCluster, scrape
from tiny_models import TINY_MODELS, save
from waiting import until

import baton
from baton import AsyncClient
from baton.core import metrics
from baton.v1 import cluster_pb2, worker_pb2

PROMPTS = [[3] * 30, [5] * 70, [7, 9] * 50, [2] * 17]
OPTIONS = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.9, "seed": 4}
ROLES = {"prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """One prefill and two decode workers; nobody but prefill workers reads prompts."""
    model = tmp_path_factory.mktemp("tiny")
    save(TINY_MODELS["llama"], model)
    tree: dict[str, object] = {
        "prefill": {"kv_memory": "4MiB", "threads": 1},
        "decode": {"kv_memory": "4MiB", "threads": 1},
        "router": {"local_prefill": "never"},
        "drain_seconds": 10.0,
    }
    with ProcessCluster(model, tmp_path_factory.mktemp("roles"), decode=2, tree=tree) as made:
        yield made


@asynccontextmanager
async def under_load(client: AsyncClient) -> AsyncIterator[list[Sequence[int]]]:
    """Streams that end and begin all the time, each held to what it says undisturbed; the tokens
    of all that have ended."""
    undisturbed = [(await client.generate(prompt, **OPTIONS)).token_ids for prompt in PROMPTS]
    answers: list[Sequence[int]] = []
    stop = asyncio.Event()

    async def ask(number: int) -> None:
        while not stop.is_set():
            answer = await client.generate(PROMPTS[number], **OPTIONS)
            assert answer.token_ids == undisturbed[number]
            answers.append(answer.token_ids)

    asking = [asyncio.create_task(ask(number)) for number in range(len(PROMPTS))]
    try:
        yield answers
    finally:
        stop.set()
        await asyncio.gather(*asking)


async def worker(client: AsyncClient, name: str) -> cluster_pb2.WorkerStatus:
    (found,) = [each for each in (await client.status()).workers if each.member.worker_id == name]
    return found


async def test_streams_are_whole_while_a_worker_changes_its_role_to_and_fro(
    cluster: ProcessCluster,
) -> None:
    async with AsyncClient(cluster.address) as client:
        process = (await worker(client, "decode-1")).member.address
        async with under_load(client) as answers:
            for role in ("prefill", "decode", "prefill", "decode"):
                done = await client.switch_role("decode-1", role)
                changed = await worker(client, "decode-1")
                assert changed.member.role == ROLES[role]
                assert not changed.draining
                assert done.switch_seconds > 0
                seen = len(answers)
                await until(lambda seen=seen: has_more(answers, seen + 4))
        assert (await worker(client, "decode-1")).member.address == process
    cluster.wait_idle()


async def has_more(answers: list[Sequence[int]], count: int) -> bool:
    return len(answers) >= count


async def test_what_a_worker_has_cached_stays_when_its_role_changes(
    cluster: ProcessCluster,
) -> None:
    prompt = [11] * 160
    async with AsyncClient(cluster.address) as client:
        await client.switch_role("decode-1", "prefill")
        both = [await client.generate(prompt, max_tokens=2) for _ in range(8)]
        assert {each.prefill_worker for each in both} <= {"prefill-0", "decode-1"}
        before = (await worker(client, "decode-1")).known_pages
        await client.switch_role("decode-1", "decode")
        assert (await worker(client, "decode-1")).known_pages == before > 0
    assert cluster.metric("decode-1", metrics.COMPUTED_TOKENS) > 0
    pages = scrape(cluster.workers["decode-1"].wait_for(r"metrics on (\S+)"), "role")
    assert f"{metrics.PAGES} decode" in pages
    assert f"{metrics.PAGES} prefill" not in pages
    cluster.wait_idle()


async def test_what_cannot_be_is_refused_by_name(cluster: ProcessCluster) -> None:
    async with AsyncClient(cluster.address) as client:
        with pytest.raises(baton.InvalidRequest, match="nobody"):
            await client.switch_role("nobody", "decode")
        with pytest.raises(baton.InvalidRequest, match="prefill or decode"):
            await client.switch_role("decode-0", "router")
        with pytest.raises(baton.RoleRefused, match="already"):
            await client.switch_role("decode-0", "decode")
        with pytest.raises(baton.RoleRefused, match="last prefill worker"):
            await client.switch_role("prefill-0", "decode")
        await client.switch_role("decode-1", "prefill")
        with pytest.raises(baton.RoleRefused, match="last decode worker"):
            await client.switch_role("decode-0", "prefill")
        await client.switch_role("decode-1", "decode")
    cluster.wait_idle()

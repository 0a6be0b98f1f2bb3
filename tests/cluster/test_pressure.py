"""Many requests, few pages, sudden ends: nothing is lost and nothing stays behind."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path

import pytest
from processes import ProcessCluster
from tiny_models import TINY_MODELS, VOCABULARY, choices_of_transformers, save

import baton
from baton import AsyncClient, FinishReason
from baton.core.types import Role

ANSWER = 40


def small(kv_memory: str = "4MiB", **router: float | str) -> dict[str, object]:
    return {
        "prefill": {"kv_memory": kv_memory, "chunk_tokens": 64, "threads": 1},
        "decode": {"kv_memory": kv_memory, "threads": 1},
        "router": router,
    }


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 120))] for _ in range(count)]


async def test_two_hundred_requests_with_random_cancels_leave_nothing_behind(
    tiny: Path, tmp_path: Path
) -> None:
    draw = random.Random(1)
    gate = asyncio.Semaphore(32)

    async def ask(client: AsyncClient, prompt: list[int]) -> str:
        cancels = draw.random() < 0.4
        async with gate:
            call = client.generate(prompt, max_tokens=draw.randint(1, 100), ignore_eos=True)
            task = asyncio.create_task(call)
            if cancels:
                await asyncio.sleep(draw.random() * 0.3)
                task.cancel()
            try:
                await task
            except (asyncio.CancelledError, baton.Cancelled):
                return "cancelled"
            return "finished"

    with ProcessCluster(tiny, tmp_path, prefill=2, decode=2, tree=small()) as cluster:
        async with AsyncClient(cluster.address) as client:
            outcomes = await asyncio.gather(*(ask(client, prompt) for prompt in prompts(200)))
        assert set(outcomes) == {"finished", "cancelled"}
        cluster.wait_idle()


async def test_a_pool_that_is_too_small_for_all_gives_the_same_tokens(
    tiny: Path, tmp_path: Path
) -> None:
    """Ten requests whose answers outgrow decode's pool: some are preempted and computed again."""
    oracle = save(TINY_MODELS["llama"], tmp_path / "model")
    asked = [prompt[:60] for prompt in prompts(10, seed=2)]
    tree = small()
    tree["decode"] = {"kv_memory": "600KiB", "threads": 1}
    with ProcessCluster(tmp_path / "model", tmp_path, tree=tree) as cluster:
        async with AsyncClient(cluster.address) as client:
            answers = await asyncio.gather(
                *(client.generate(prompt, max_tokens=150) for prompt in asked)
            )
        found = [list(answer.token_ids) for answer in answers]
        assert [len(tokens) for tokens in found] == [150] * 10
        assert found == choices_of_transformers(oracle, asked, found)
        cluster.wait_idle()


async def test_the_context_ends_an_answer(tiny: Path, tmp_path: Path) -> None:
    with ProcessCluster(tiny, tmp_path, tree=small()) as cluster:
        async with AsyncClient(cluster.address) as client:
            answer = await client.generate([5] * 250, ignore_eos=True)
            with pytest.raises(baton.PromptTooLong):
                await client.generate([5] * 256)
        assert answer.usage.completion_tokens == 6
        assert answer.finish_reason is FinishReason.LENGTH


async def test_a_request_beyond_the_limit_is_refused(tiny: Path, tmp_path: Path) -> None:
    with ProcessCluster(tiny, tmp_path, tree=small(max_requests=1)) as cluster:
        async with AsyncClient(cluster.address) as client, client.stream([1]) as stream:
            await anext(aiter(stream))
            with pytest.raises(baton.Exhausted):
                await client.generate([1])


@pytest.mark.parametrize("role", list(Role))
async def test_a_request_outlives_the_only_worker_of_its_kind(
    role: Role, tiny: Path, tmp_path: Path
) -> None:
    """It waits for the worker to come back, and goes on where it was."""
    tree = small(placement_timeout=60.0, local_prefill="never")
    options = {"ignore_eos": True, "max_tokens": 200, "temperature": 0.8, "seed": 3}
    with ProcessCluster(tiny, tmp_path, tree=tree) as cluster:
        name = f"{role.value}-0"
        port = int(cluster.workers[name].wait_for(r"ready on \S+:(\d+)"))
        async with AsyncClient(cluster.address) as client:
            undisturbed = await client.generate([3] * 30, **options)
            async with client.stream([3] * 30, **options) as stream:
                await anext(aiter(stream))
                cluster.workers[name].kill()
                cluster.start_worker(role, 0, port).wait_for(r"ready on (\S+)")
                answer = await stream.read()
        assert answer.token_ids == undisturbed.token_ids
        cluster.wait_idle()


async def test_a_router_that_dies_leaves_no_pages_behind(tiny: Path, tmp_path: Path) -> None:
    with ProcessCluster(tiny, tmp_path, tree=small()) as cluster:
        async with AsyncClient(cluster.address) as client:
            stream = client.stream([3] * 200, ignore_eos=True)
            await anext(aiter(stream))
            cluster.router.kill()
        cluster.start_router()
        cluster.wait_idle()
        async with AsyncClient(cluster.address) as client:
            assert (await client.generate([3], max_tokens=3)).usage.completion_tokens


async def test_pools_of_different_page_sizes_are_refused_at_connect(
    tiny: Path, tmp_path: Path
) -> None:
    cluster = ProcessCluster(
        tiny, tmp_path, tree=small(), per_worker={"decode-0": {"page_size": 32}}, wait_ready=False
    )
    with cluster:
        async with AsyncClient(cluster.address) as client:
            with pytest.raises(baton.LayoutMismatch, match="page_size"):
                await client.generate([1], timeout=20)
            status = await client.status()
    assert any("page_size" in worker.fault for worker in status.workers)


async def test_without_workers_a_request_ends_in_unavailable(tiny: Path, tmp_path: Path) -> None:
    tree = small(placement_timeout=0.5, local_prefill="never")
    with ProcessCluster(tiny, tmp_path, prefill=0, tree=tree, wait_ready=False) as cluster:
        async with AsyncClient(cluster.address) as client:
            began = time.monotonic()
            with pytest.raises(baton.Unavailable, match="prefill"):
                await client.generate([1])
    assert time.monotonic() - began < 20


async def test_a_client_deadline_ends_the_request_everywhere(tiny: Path, tmp_path: Path) -> None:
    with ProcessCluster(tiny, tmp_path, tree=small()) as cluster:
        cluster.workers["decode-0"].send(signal.SIGSTOP)
        async with AsyncClient(cluster.address) as client:
            with pytest.raises(baton.DeadlineExceeded):
                await client.generate([3] * 10, max_tokens=50, timeout=1.0)
        cluster.workers["decode-0"].send(signal.SIGCONT)
        cluster.wait_idle()

"""More requests than fit, clients that go away, clients that do not read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from processes import ProcessCluster, scrape
from tiny_models import TINY_MODELS, VOCABULARY, save
from waiting import until

import baton
from baton import AsyncClient
from baton.core import metrics
from baton.request_builder import generate_request
from baton.v1.inference_pb2_grpc import InferenceStub

CHUNK = 512


def tree(decode_memory: str = "4MiB", **router: float) -> dict[str, object]:
    return {
        "prefill": {"kv_memory": "4MiB", "threads": 1},
        "decode": {"kv_memory": decode_memory, "threads": 1},
        "router": router,
    }


def computed(cluster: ProcessCluster, worker: str) -> float:
    return cluster.metric(worker, metrics.COMPUTED_TOKENS)


async def has_begun(cluster: ProcessCluster, before: float) -> bool:
    return computed(cluster, "prefill-0") > before


async def is_idle(client: AsyncClient) -> bool:
    return not (await client.status()).active_requests


async def test_a_prompt_behind_ten_cancelled_ones_is_computed_at_once(
    idle: ProcessCluster,
) -> None:
    """Counted in tokens that the prefill worker computes, which no machine's speed changes."""
    before = computed(idle, "prefill-0")
    decoded = computed(idle, "decode-0")
    async with AsyncClient(idle.address) as client:
        streams = [client.stream([7] * 3000, max_tokens=8) for _ in range(10)]
        await until(lambda: has_begun(idle, before))
        for stream in streams:
            stream.cancel()
        cancelled = computed(idle, "prefill-0")
        answer = await client.generate([9] * 40, max_tokens=2, ignore_eos=True)
        after = computed(idle, "prefill-0")
    assert answer.usage.completion_tokens == 2
    # The chunk under way at the cancel, one that may have begun before it arrived, and its own.
    assert after - cancelled <= 2 * CHUNK + 40
    await asyncio.to_thread(idle.wait_idle)
    assert computed(idle, "decode-0") - decoded == 1


async def test_a_cancelled_answer_stops_at_the_next_step(idle: ProcessCluster) -> None:
    async with AsyncClient(idle.address) as client:
        async with client.stream([7] * 20, max_tokens=2000, ignore_eos=True) as stream:
            for _ in range(5):
                await anext(stream)
        at_cancel = computed(idle, "decode-0")
        await asyncio.to_thread(idle.wait_idle)
        assert computed(idle, "decode-0") - at_cancel <= 5


async def test_requests_wait_in_the_routers_queue_when_decode_is_full(
    tiny: Path, tmp_path: Path
) -> None:
    """First come, first served; counted, shown, and refused beyond the bound."""
    configured = tree("300KiB", worker_backlog=1, max_queued=6)
    prompt = [5] * 150
    finished: list[int] = []

    async def ask(client: AsyncClient, number: int) -> None:
        # Without salts of their own they would share the prompt's pages.
        await client.generate(prompt, max_tokens=90, ignore_eos=True, cache_salt=str(number))
        finished.append(number)

    with ProcessCluster(tiny, tmp_path, tree=configured) as cluster:
        async with AsyncClient(cluster.address) as client:
            # The first transfer connects the workers; requests that wait for that arrive together,
            # in no order.
            await client.generate([6] * 150, max_tokens=2)
            tasks = []
            for number in range(8):
                tasks.append(asyncio.create_task(ask(client, number)))
                await asyncio.sleep(0.02)
            await until(lambda: waits(client, 4))
            status = await client.status()
            waiting = [worker.load.waiting for worker in status.workers]
            queued = scrape(cluster.metrics)[metrics.QUEUED_REQUESTS]
            with pytest.raises(baton.Exhausted) as refused:
                await asyncio.gather(*(client.generate(prompt, max_tokens=9) for _ in range(12)))
            await asyncio.gather(*tasks)
        assert status.queued_requests >= 4
        assert status.queue_limit == 6
        assert queued >= 4
        assert max(waiting) <= 2
        assert refused.value.retry_after >= 1.0
        assert finished == sorted(finished)
        cluster.wait_idle()


async def test_a_request_overtakes_those_of_a_later_priority_in_the_queue(
    tiny: Path, tmp_path: Path
) -> None:
    finished: list[str] = []

    async def ask(client: AsyncClient, name: str, priority: int) -> None:
        fields = {"max_tokens": 90, "ignore_eos": True, "cache_salt": name}
        await client.generate([5] * 150, priority=priority, **fields)
        finished.append(name)

    with ProcessCluster(tiny, tmp_path, tree=tree("300KiB", worker_backlog=1)) as cluster:
        async with AsyncClient(cluster.address) as client:
            batch = [asyncio.create_task(ask(client, f"batch-{each}", 1000)) for each in range(8)]
            await until(lambda: waits(client, 4))
            queued = (await client.status()).queued_priorities
            await asyncio.gather(ask(client, "live", 0), *batch)
        assert [each.priority for each in queued] == [1000]
        assert len(finished[finished.index("live") :]) > 2, "it has overtaken those that waited"
        cluster.wait_idle()


async def waits(client: AsyncClient, count: int) -> bool:
    return (await client.status()).queued_requests >= count


@pytest.mark.parametrize("pages", [16, 21])
async def test_any_pool_that_holds_one_request_serves_them_all(
    tiny: Path, tmp_path: Path, pages: int
) -> None:
    """A request of the longest context takes 16 pages."""
    page_bytes = 2 * 3 * 16 * 4 * 12 * 4
    memory = f"{pages * page_bytes}B"
    configured = {role: {"kv_memory": memory, "threads": 1} for role in ("prefill", "decode")}
    draw = random.Random(pages)
    asked = [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 200))] for _ in range(6)]
    with ProcessCluster(tiny, tmp_path, tree=dict(configured)) as cluster:
        async with AsyncClient(cluster.address) as client:
            answers = await asyncio.gather(
                *(client.generate(prompt, ignore_eos=True, timeout=120) for prompt in asked)
            )
        assert [answer.usage.completion_tokens for answer in answers] == [
            256 - len(prompt) for prompt in asked
        ]
        cluster.wait_idle()


@asynccontextmanager
async def stopped_reader(address: str, prompt: list[int]) -> AsyncIterator[grpc.aio.Call]:
    """A client that reads one message and then nothing more. It takes in little unread, so that
    few tokens are enough."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        call = InferenceStub(channel).Generate(generate_request(prompt, {"ignore_eos": True}))
        await call.read()
        yield call
        call.cancel()


async def read_all(call: grpc.aio.Call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_reader_that_stops_is_cut_off_and_slows_nobody(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save(TINY_MODELS["llama"].changed(max_position_embeddings=32768), model)
    with ProcessCluster(model, tmp_path, tree=tree(reader_buffer=200)) as cluster:
        async with (
            AsyncClient(cluster.address) as client,
            stopped_reader(cluster.address, [3]) as stopped,
        ):
            neighbour = await client.generate([4], max_tokens=300, ignore_eos=True)
            assert neighbour.usage.completion_tokens == 300
            await until(lambda: is_idle(client))
            await asyncio.to_thread(cluster.wait_idle)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(stopped)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "not read in time" in (caught.value.details() or "")
        assert scrape(cluster.metrics, "outcome")[f"{metrics.REQUESTS} SLOW_READER"] == 1.0

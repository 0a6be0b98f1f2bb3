"""What attempts do in a whole cluster beyond the fault matrix: local prefill, poison, deadlines."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from processes import ProcessCluster
from waiting import until

import baton
from baton import AsyncClient, AsyncStream
from baton.core.types import Role

OPTIONS = {"max_tokens": 160, "ignore_eos": True, "temperature": 0.9, "seed": 4}
PROMPT = [3] * 30


def tree(**router: float | str) -> dict[str, object]:
    return {
        "prefill": {"kv_memory": "4MiB", "threads": 1},
        "decode": {"kv_memory": "4MiB", "threads": 1},
        "router": router,
    }


async def writer(client: AsyncClient) -> str:
    """The one decode worker that is in use; empty while there is none, or another."""
    names = [
        worker.member.worker_id
        for worker in (await client.status()).workers
        if worker.active_requests and worker.member.worker_id.startswith("decode")
    ]
    return names[0] if len(names) == 1 else ""


async def somebody_writes(client: AsyncClient, cluster: ProcessCluster) -> bool:
    return await writer(client) in cluster.workers


async def read_some(stream: AsyncStream, count: int) -> None:
    for _ in range(count):
        await anext(stream)


async def test_without_prefill_workers_decode_workers_read_prompts(
    tiny: Path, tmp_path: Path
) -> None:
    with ProcessCluster(tiny, tmp_path, tree=tree(local_prefill_after=0.2)) as cluster:
        async with AsyncClient(cluster.address) as client:
            undisturbed = await client.generate(PROMPT, **OPTIONS)
            cluster.workers["prefill-0"].kill()
            answer = await client.generate(PROMPT, **OPTIONS)
            one = await client.generate(PROMPT, max_tokens=1)
            assert answer.token_ids == undisturbed.token_ids
            (placement,) = answer.placements
            assert (placement.prefill_worker, placement.decode_worker) == ("", "decode-0")
            assert (placement.policy, placement.reason) == ("local", "no prefill worker is ready")
            assert (one.usage.completion_tokens, one.placements[0].policy) == (1, "local")
            await asyncio.to_thread(cluster.restart, "prefill-0")
            await client.wait_ready()
            back = await client.generate(PROMPT, **OPTIONS)
        assert back.placements[0].policy == "split"
        assert back.token_ids == undisturbed.token_ids
        cluster.wait_idle()


async def test_who_loses_three_workers_for_good_is_answered(tiny: Path, tmp_path: Path) -> None:
    """Nobody comes back to say how they ended."""
    with ProcessCluster(tiny, tmp_path, decode=4, tree=tree(placement_timeout=1.0)) as cluster:
        async with AsyncClient(cluster.address) as client:
            undisturbed = await client.generate(PROMPT, **OPTIONS)
            stream = client.stream(PROMPT, **OPTIONS)
            await read_some(stream, 3)
            for _ in range(3):
                await until(lambda: somebody_writes(client, cluster))
                cluster.workers.pop(await writer(client)).kill()
            answer = await stream.read()
        assert answer.token_ids == undisturbed.token_ids
        assert answer.placements[-1].reason.endswith("alone, since 3 workers were lost")


async def test_a_host_that_takes_its_workers_along_takes_no_request_with_it(
    tiny: Path, tmp_path: Path
) -> None:
    """Both are silent when the first is found to be, and the request waits for one to answer."""
    configured = tree(ping_seconds=0.2, frozen_seconds=1.0)
    with ProcessCluster(tiny, tmp_path, decode=2, tree=configured) as cluster:
        async with AsyncClient(cluster.address) as client:
            undisturbed = await client.generate(PROMPT, **OPTIONS)
            stream = client.stream(PROMPT, **OPTIONS)
            await read_some(stream, 3)
            await until(lambda: somebody_writes(client, cluster))
            first = await writer(client)
            (second,) = {"decode-0", "decode-1"} - {first}
            cluster.workers[first].send(signal.SIGSTOP)
            await asyncio.sleep(0.5)
            cluster.workers[second].send(signal.SIGSTOP)
            await until(lambda: is_lost(client, second))
            cluster.workers[second].send(signal.SIGCONT)
            answer = await stream.read()
            cluster.workers[first].send(signal.SIGCONT)
            assert answer.token_ids == undisturbed.token_ids
            assert [each.decode_worker for each in answer.placements] == [first, second]


async def is_lost(client: AsyncClient, name: str) -> bool:
    workers = (await client.status()).workers
    return name not in [each.member.worker_id for each in workers if each.attached]


async def test_a_clients_deadline_holds_over_all_attempts(tiny: Path, tmp_path: Path) -> None:
    with ProcessCluster(tiny, tmp_path, tree=tree(placement_timeout=60.0)) as cluster:
        async with AsyncClient(cluster.address) as client:
            await client.generate(PROMPT, max_tokens=2)  # connects the workers
            stream = client.stream(PROMPT, **{**OPTIONS, "timeout": 4.0})
            await read_some(stream, 3)
            cluster.workers.pop("decode-0").kill()
            with pytest.raises(baton.DeadlineExceeded):
                await stream.read()
            assert not (await client.status()).active_requests


async def test_a_request_waits_only_so_long_for_a_worker_to_come_back(
    tiny: Path, tmp_path: Path
) -> None:
    with ProcessCluster(tiny, tmp_path, tree=tree(placement_timeout=0.5)) as cluster:
        async with AsyncClient(cluster.address) as client:
            stream = client.stream(PROMPT, **OPTIONS)
            await read_some(stream, 3)
            cluster.workers.pop("decode-0").kill()
            with pytest.raises(baton.Unavailable, match="no decode worker"):
                await stream.read()


@pytest.mark.parametrize("role", list(Role))
async def test_many_streams_outlive_one_worker(tiny: Path, tmp_path: Path, role: Role) -> None:
    """Each with its own seed and length: none gets another's tokens.

    A prompt that is read again is rounded otherwise than when it was decoded: none of these
    seeds draws so close to the border between two tokens that this could decide.
    """
    asked = [
        ([index + 1] * (5 + 7 * index), {**OPTIONS, "seed": index + 40}) for index in range(12)
    ]
    with ProcessCluster(tiny, tmp_path, prefill=2, decode=2, tree=tree()) as cluster:
        async with AsyncClient(cluster.address) as client:

            async def ask_all() -> list[tuple[int, ...]]:
                answers = [client.generate(prompt, **options) for prompt, options in asked]
                return [answer.token_ids for answer in await asyncio.gather(*answers)]

            undisturbed = await ask_all()
            task = asyncio.create_task(ask_all())
            await asyncio.sleep(0.15)
            cluster.workers.pop(f"{role.value}-0").kill()
            assert await task == undisturbed


async def test_who_loses_any_number_of_workers_that_were_killed_is_answered(
    tiny: Path, tmp_path: Path
) -> None:
    """Each worker that comes back reports that the one before was killed from outside.

    Workers hold the answers, which would else end before all are killed.
    """
    configured = tree(placement_timeout=60.0, local_prefill="never")
    options = {**OPTIONS, "timeout": 120.0}

    async def running(client: AsyncClient, count: int) -> bool:
        (decode,) = [w for w in (await client.status()).workers if "decode" in w.member.worker_id]
        return decode.load.running == count

    with ProcessCluster(tiny, tmp_path, tree=configured, module="faulty_worker") as cluster:
        async with AsyncClient(cluster.address) as client:
            undisturbed = (await client.generate(PROMPT, **options)).token_ids
            hold = tmp_path / "faults" / "hold"
            hold.touch()
            tasks = [asyncio.create_task(client.generate(PROMPT, **options)) for _ in range(2)]
            for life in range(5):
                await until(lambda: running(client, 2))
                cluster.workers["decode-0"].kill()
                if life == 4:
                    hold.unlink()
                await asyncio.to_thread(cluster.restart, "decode-0")
            answers = await asyncio.gather(*tasks)
            assert [answer.token_ids for answer in answers] == [undisturbed] * 2
        cluster.wait_idle()

"""Workers that leave, freeze and come back; what their health says."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import Process, ProcessCluster
from safetensors.torch import load_file, save_file
from streams import begin
from waiting import until

import baton
from baton import Answer, AsyncClient, AsyncStream
from baton.cluster.controller import MembershipService
from baton.core import metrics
from baton.core.types import Role
from baton.core.wire import role_to
from baton.v1 import cluster_pb2, cluster_pb2_grpc

OPTIONS = {"max_tokens": 220, "ignore_eos": True, "temperature": 0.9, "seed": 4}
PROMPT = [3] * 30


def tree(drain_seconds: float = 60.0, **router: float | str) -> dict[str, object]:
    return {
        "prefill": {"kv_memory": "4MiB", "threads": 1},
        "decode": {"kv_memory": "4MiB", "threads": 1},
        "router": router,
        "drain_seconds": drain_seconds,
    }


@asynccontextmanager
async def stream_under_way(client: AsyncClient) -> AsyncIterator[tuple[AsyncStream, str]]:
    """An answer that has begun, and the decode worker that writes it."""
    stream, name = await begin(client, PROMPT, **OPTIONS)
    async with stream:
        yield stream, name


async def is_draining(client: AsyncClient, name: str) -> bool:
    workers = (await client.status()).workers
    return any(worker.draining for worker in workers if worker.member.worker_id == name)


async def router_drains(client: AsyncClient) -> bool:
    return (await client.status()).draining


async def knows(client: AsyncClient, workers: int) -> bool:
    return len((await client.status()).workers) == workers


async def all_attached(client: AsyncClient) -> bool:
    return all(worker.attached for worker in (await client.status()).workers)


def ended(cluster: ProcessCluster, name: str) -> None:
    """Asserts that a worker ended well, and forgets it."""
    assert cluster.workers.pop(name).wait() == 0


def decode_workers(answer: Answer) -> list[str]:
    return [placement.decode_worker for placement in answer.placements]


async def test_a_drained_worker_finishes_what_runs_and_gets_nothing_new(
    tiny: Path, tmp_path: Path
) -> None:
    with ProcessCluster(tiny, tmp_path, decode=2, tree=tree()) as cluster:
        async with AsyncClient(cluster.address) as client:
            undisturbed = await client.generate(PROMPT, **OPTIONS)
            async with stream_under_way(client) as (stream, name):
                cluster.workers[name].send(signal.SIGTERM)
                await until(lambda: is_draining(client, name))
                others = [await client.generate([1], max_tokens=2) for _ in range(3)]
                answer = await stream.read()
        assert {other.decode_worker for other in others} == {"decode-0", "decode-1"} - {name}
        assert answer.token_ids == undisturbed.token_ids
        assert decode_workers(answer) == [name]
        ended(cluster, name)


@pytest.mark.parametrize("way", ["SIGTERM", "baton drain"])
async def test_past_the_bound_a_drained_workers_requests_go_on_elsewhere(
    tiny: Path, tmp_path: Path, way: str
) -> None:
    with ProcessCluster(tiny, tmp_path, decode=2, tree=tree(drain_seconds=0.0)) as cluster:
        async with AsyncClient(cluster.address) as client:
            undisturbed = await client.generate(PROMPT, **OPTIONS)
            async with stream_under_way(client) as (stream, name):
                if way == "SIGTERM":
                    cluster.workers[name].send(signal.SIGTERM)
                else:
                    await client.drain(name)
                answer = await stream.read()
        assert answer.token_ids == undisturbed.token_ids
        assert len(decode_workers(answer)) == 2
        assert "drained" in answer.placements[1].reason
        ended(cluster, name)


async def test_who_is_not_there_cannot_be_drained(tiny: Path, tmp_path: Path) -> None:
    with ProcessCluster(tiny, tmp_path, tree=tree()) as cluster:
        async with AsyncClient(cluster.address) as client:
            with pytest.raises(baton.InvalidRequest, match="nobody"):
                await client.drain("nobody")


async def test_a_router_that_stops_lets_its_answers_end(tiny: Path, tmp_path: Path) -> None:
    with ProcessCluster(tiny, tmp_path, tree=tree()) as cluster:
        async with AsyncClient(cluster.address) as client:
            undisturbed = await client.generate(PROMPT, **OPTIONS)
            async with stream_under_way(client) as (stream, _):
                cluster.router.send(signal.SIGTERM)
                await until(lambda: router_drains(client))
                with pytest.raises(baton.Unavailable, match="about to stop"):
                    await client.generate([1])
                assert (await stream.read()).token_ids == undisturbed.token_ids
        assert cluster.router.wait() == 0


async def test_a_second_signal_ends_a_router_at_once(tiny: Path, tmp_path: Path) -> None:
    with ProcessCluster(tiny, tmp_path, tree=tree()) as cluster:
        async with (
            AsyncClient(cluster.address) as client,
            stream_under_way(client) as (stream, _),
        ):
            for _ in range(2):
                cluster.router.send(signal.SIGTERM)
                await asyncio.sleep(0.1)
            with pytest.raises(baton.Unavailable, match="this router is stopping"):
                await stream.read()


def test_a_worker_whose_end_hangs_says_where_and_ends(tiny: Path, tmp_path: Path) -> None:
    cluster = ProcessCluster(tiny, tmp_path, tree=tree(drain_seconds=0.1), module="stuck_worker")
    worker = cluster.start_worker(Role.DECODE, 0)
    worker.wait_for(r"ready on (\S+)")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 1
    assert "Timeout" in worker.log
    assert "stuck_worker.py" in worker.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_worker_whose_start_hangs(
    number: signal.Signals, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUCK_START", "1")
    cluster = ProcessCluster(tiny, tmp_path, tree=tree(), module="stuck_worker")
    worker = cluster.start_worker(Role.DECODE, 0)
    worker.wait_for("(hanging)")
    worker.send(number)
    assert worker.wait() == 0


def stuck_router(tiny: Path, folder: Path) -> Process:
    ports = {"port": 0, "http_port": 0, "metrics_port": 0}
    config = folder / "router.yaml"
    keys = {"model": str(tiny), "router": ports, "drain_seconds": 0.1}
    config.write_text(yaml.safe_dump(keys))
    return Process(folder, "router", ["stuck_router", "--config", str(config)])


def test_a_signal_ends_a_router_whose_start_hangs(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUCK_START", "1")
    router = stuck_router(tiny, tmp_path)
    router.wait_for("(hanging)")
    router.send(signal.SIGTERM)
    assert router.wait() == 0


def test_a_router_whose_end_hangs_says_where_and_ends(tiny: Path, tmp_path: Path) -> None:
    router = stuck_router(tiny, tmp_path)
    router.wait_for("(router ready)")
    router.send(signal.SIGTERM)
    assert router.wait() == 1
    assert "Timeout" in router.log


async def test_a_frozen_worker_is_routed_around_and_rejoins(tiny: Path, tmp_path: Path) -> None:
    configured = tree(frozen_seconds=1.5)
    with ProcessCluster(tiny, tmp_path, decode=2, tree=configured) as cluster:
        async with AsyncClient(cluster.address) as client:
            undisturbed = await client.generate(PROMPT, **OPTIONS)
            async with stream_under_way(client) as (stream, name):
                cluster.workers[name].send(signal.SIGSTOP)
                answer = await stream.read()
                status = await client.status()
                assert [w.attached for w in status.workers if w.member.worker_id == name] == [False]
                cluster.workers[name].send(signal.SIGCONT)
            assert answer.token_ids == undisturbed.token_ids
            assert "not answered" in answer.placements[1].reason
            await client.wait_ready()
            await until(lambda: all_attached(client))
            again = [await client.generate([1], max_tokens=2) for _ in range(2)]
        assert all(answer.usage.completion_tokens == 2 for answer in again)
        cluster.wait_idle()


def check(address: str, service: str) -> int:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        status: int = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status
        return status


async def test_a_peers_death_fails_nobody_elses_health(tiny: Path, tmp_path: Path) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    with ProcessCluster(tiny, tmp_path, tree=tree(local_prefill="never")) as cluster:
        decode = cluster.worker_address("decode-0")
        prefill = cluster.worker_address("prefill-0")
        for address in (decode, prefill):
            assert check(address, "") == check(address, "baton.v1.Worker") == serving
        cluster.workers.pop("prefill-0").kill()
        await asyncio.sleep(1.5)
        assert check(decode, "") == check(decode, "baton.v1.Worker") == serving
        assert check(cluster.address, "") == serving
        assert check(cluster.address, "baton.v1.Inference") != serving


async def test_an_idle_worker_makes_a_token_now_and_then(tiny: Path, tmp_path: Path) -> None:
    async def has_computed(name: str) -> bool:
        return cluster.metric(name, metrics.COMPUTED_TOKENS) >= 3

    with ProcessCluster(tiny, tmp_path, tree=tree(canary_seconds=0.2)) as cluster:
        for name in cluster.workers:
            await until(lambda name=name: has_computed(name))
        async with AsyncClient(cluster.address) as client:
            assert not any(worker.fault for worker in (await client.status()).workers)


async def test_a_failed_canary_is_named_in_errors_and_health(tiny: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(tiny, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.embed_tokens.weight"][0] = float("nan")  # which only the canary asks for
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    settings = tree(canary_seconds=0.2, local_prefill="never", placement_timeout=0.5)
    with ProcessCluster(broken, tmp_path, tree=settings, wait_ready=False) as cluster:

        async def all_failed() -> bool:
            faults = [worker.fault for worker in (await client.status()).workers]
            return len(faults) == 2 and all("its canary failed" in fault for fault in faults)

        async with AsyncClient(cluster.address) as client:
            await until(all_failed)
            with pytest.raises(baton.Unavailable) as refused:
                await client.generate([1, 2], max_tokens=3)
            with pytest.raises(baton.DeadlineExceeded, match="prefill-0: its canary failed"):
                await client.wait_ready(timeout=0.1)
        message = "no prefill worker is ready: prefill-0 failed its canary"
        assert refused.value.message == message
        async with httpx.AsyncClient(base_url=f"http://{cluster.http}") as http:
            asked = await http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 3})
            ready = await http.get("/ready")
        assert (asked.status_code, asked.json()["error"]["message"]) == (503, message)
        health = "no workers are ready: prefill-0 failed its canary, decode-0 failed its canary"
        assert (ready.status_code, ready.json()["error"]["message"]) == (503, health)


async def publish(membership: MembershipService, cluster: ProcessCluster, *names: str) -> None:
    workers = [
        cluster_pb2.Member(
            worker_id=name,
            role=role_to(Role(name.partition("-")[0])),
            address=cluster.worker_address(name),
        )
        for name in names
    ]
    await membership.publish(cluster_pb2.Members(workers=workers))


@pytest.mark.parametrize("drain_seconds", [60.0, 0.0])
async def test_a_worker_that_is_no_longer_a_member_keeps_or_hands_over_its_requests(
    tiny: Path, tmp_path: Path, drain_seconds: float
) -> None:
    membership = MembershipService()
    server = grpc.aio.server()
    cluster_pb2_grpc.add_MembershipServicer_to_server(membership, server)
    controller = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    made = ProcessCluster(
        *(tiny, tmp_path),
        decode=2,
        tree=tree(drain_seconds),
        wait_ready=False,
        controller=controller,
    )
    cluster = await asyncio.to_thread(made.__enter__)
    try:
        everyone = ["prefill-0", "decode-0", "decode-1"]
        await publish(membership, cluster, *everyone)
        async with AsyncClient(cluster.address) as client:
            await client.wait_ready()
            undisturbed = await client.generate(PROMPT, **OPTIONS)
            async with stream_under_way(client) as (stream, name):
                await publish(membership, cluster, *(each for each in everyone if each != name))
                answer = await stream.read()
            assert answer.token_ids == undisturbed.token_ids
            assert len(answer.placements) == (1 if drain_seconds else 2)
            await until(lambda: knows(client, workers=2))
            assert (await client.generate([1], max_tokens=2)).decode_worker != name
    finally:
        await asyncio.to_thread(made.__exit__, None, None, None)
        await server.stop(None)

"""A network that is cut between prefill and decode, and mended: real processes, NIXL over TCP.

test_cut_network.py runs this file in namespaces of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Iterator

import pytest
from network import Network
from processes import ProcessCluster
from waiting import until

from baton import Answer, AsyncClient
from baton.core.model_store import EMBEDDED
from baton.v1.cluster_pb2 import WorkerStatus

PROMPT = "The wind and the sun argued about which of them was the stronger. " * 16
OPTIONS = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.8, "seed": 3, "timeout": 60.0}
CHUNK = 32


@pytest.fixture(scope="module")
def cluster(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    section = {"kv_memory": "64MiB", "threads": 1, "chunk_tokens": CHUNK}
    hosts = {"prefill": network.near, "decode": network.far}
    with ProcessCluster(
        EMBEDDED,
        tmp_path_factory.mktemp("cut"),
        tree={"router": {"local_prefill_after": 0.2}, "insecure": True},
        per_worker={
            f"{role}-0": {role: {**section, "host": host.address}} for role, host in hosts.items()
        },
        # Else the two would find that they share a machine.
        before={f"{role}-0": [*host.enter, "env", "UCX_TLS=tcp"] for role, host in hosts.items()},
    ) as running:
        yield running


async def ask(client: AsyncClient, salt: str) -> Answer:
    """With a salt of its own a prompt is computed and sent, however often it was before."""
    return await client.generate(PROMPT, cache_salt=salt, **OPTIONS)  # type: ignore[arg-type]


async def workers(client: AsyncClient) -> tuple[WorkerStatus, WorkerStatus]:
    found = {worker.member.worker_id: worker for worker in (await client.status()).workers}
    return found["prefill-0"], found["decode-0"]


async def connected(client: AsyncClient) -> bool:
    prefill, _ = await workers(client)
    return list(prefill.connected) == ["decode-0"]


async def see_quarantine(client: AsyncClient) -> None:
    """Returns when both sides have held pages for the stuck write, at some time: each only until
    it finds the connection broken."""
    seen: set[str] = set()

    async def both() -> bool:
        for worker in await workers(client):
            if worker.load.quarantined_pages:
                seen.add(worker.member.worker_id)
        return len(seen) == 2

    await until(both, 60)


async def cut_during_a_push(
    network: Network, cluster: ProcessCluster, client: AsyncClient, whole: int
) -> asyncio.Task[Answer]:
    """Cuts the network while a prompt's pages, of `whole` bytes, are being pushed; the request.

    The prefill worker is frozen once a tenth of the bytes has passed. If a tenth is missing when
    no more of them come, it was caught in time: the rest is pushed into the cut network.
    """
    prefill = cluster.workers["prefill-0"]
    for attempt in itertools.count():
        before = network.bytes_to(network.far)

        async def is_under_way(before: int = before) -> bool:
            return network.bytes_to(network.far) - before >= whole // 10

        asking = asyncio.create_task(ask(client, f"cut-{attempt}"))
        await until(is_under_way, pause=0.001)
        prefill.send(signal.SIGSTOP)
        await asyncio.sleep(0.3)  # what its kernel has taken still passes
        in_time = network.bytes_to(network.far) - before < whole - whole // 10
        if in_time:
            network.cut()
        prefill.send(signal.SIGCONT)
        if in_time:
            return asking
        await asking
    raise AssertionError("unreachable")


async def test_answers_go_on_while_the_network_is_cut_and_nothing_is_left_when_it_is_mended(
    network: Network, cluster: ProcessCluster
) -> None:
    async with AsyncClient(cluster.address) as client:
        before = network.bytes_to(network.far)
        undisturbed = await ask(client, "undisturbed")
        whole = network.bytes_to(network.far) - before

        asking = await cut_during_a_push(network, cluster, client, whole)
        watching = asyncio.create_task(see_quarantine(client))
        survived = await asking
        assert survived.token_ids == undisturbed.token_ids
        first, second = survived.placements
        assert (first.policy, second.policy) == ("split", "local")
        assert "has been silent for" in second.reason

        # New requests do not use the pair; both workers are sound.
        assert not await connected(client)
        await watching
        assert [worker.fault for worker in await workers(client)] == ["", ""]
        assert (await ask(client, "meanwhile")).placements[0].policy == "local"

        network.mend()
        await until(lambda: connected(client), 60)
        await asyncio.to_thread(cluster.wait_idle, 60)
        again = await ask(client, "mended")
        assert again.placements[0].policy == "split"
        assert again.token_ids == undisturbed.token_ids
    await asyncio.to_thread(cluster.wait_idle)

"""A cluster on a Ray of several nodes, while nodes, the controller and Ray's own head come and go.

Every answer must be complete and the undisturbed one. `make test-fleet` runs this file, and
prints how long each recovery took.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import recoveries
import yaml
from ray_nodes import TOKEN, RayNodes, why_no_redis
from serving import Serve
from steady_load import ANSWER_TOKENS, QUESTIONS, SteadyLoad
from tiny_models import TINY_MODELS, generate_with_transformers, save
from transformers import PreTrainedModel

from baton.v1.cluster_pb2 import WorkerStatus

pytestmark = pytest.mark.fleet

RECOVERY_SECONDS = 120.0
POOL = {"workers": 2, "gpus": 1, "kv_memory": "4MiB", "threads": 1}


@dataclass(frozen=True)
class Cluster:
    ray: RayNodes
    serve: Serve
    oracle: PreTrainedModel

    def workers(self) -> dict[str, WorkerStatus]:
        """Those that are attached, by name."""
        with self.serve.client() as client:
            found = client.status().workers
        return {each.member.worker_id: each for each in found if each.attached}

    def workers_of(self, node: str) -> set[str]:
        with self.serve.client() as client:
            return self.ray.nodes[node].workers(client.status())

    def incarnations(self) -> dict[str, int]:
        """Of each worker, what tells its process from others."""
        return {name: worker.incarnation for name, worker in self.workers().items()}

    def controller(self) -> int:
        """The controller's process; 0 while there is none."""
        found = [pid for pid, line in self._processes().items() if line == "ray::Controller"]
        return found[0] if found else 0

    def pid(self, worker: str) -> int:
        (node,) = [name for name in self.ray.nodes if worker in self.workers_of(name)]
        address = self.workers()[worker].member.address
        return self.ray.nodes[node].listener(int(address.rpartition(":")[2]))

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + RECOVERY_SECONDS
        while not await asyncio.to_thread(condition):
            assert time.monotonic() < deadline, self.workers()
            await asyncio.sleep(0.1)

    async def until_whole(self) -> None:
        """Returns when every worker of both pools is used."""
        await self.until(self._is_whole)

    def _is_whole(self) -> bool:
        workers = self.workers()
        connected = [len(each.connected) for each in workers.values() if each.connected]
        return len(workers) == 4 and connected == [2, 2]

    def _processes(self) -> dict[int, str]:
        return {
            pid: line for node in self.ray.nodes.values() for pid, line in node.processes().items()
        }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers on each of two nodes; the router and the controller are on the head."""
    folder = tmp_path_factory.mktemp("nodes")
    oracle = save(TINY_MODELS["llama"], folder / "model")
    settings = {
        "insecure": True,
        "device": "cpu",
        "model": str(folder / "model"),
        "prefill": POOL,
        "decode": POOL,
        "router": {"local_prefill": "fallback"},
    }
    config = folder / "baton.yaml"
    config.write_text(yaml.safe_dump(settings))
    with RayNodes(redis=not why_no_redis()) as ray:
        for name in ("one", "two"):
            ray.add(name, slots=2)
        flags = ["--config", str(config), "--ray-address", ray.address]
        with Serve(folder / "serve", *flags, environment=TOKEN) as serve:
            serve.ready().wait_whole(4)
            yield Cluster(ray, serve, oracle)


@pytest.fixture
def redis() -> None:
    if reason := why_no_redis():
        pytest.skip(reason)


def same_as_transformers(cluster: Cluster, load: SteadyLoad) -> bool:
    return all(
        load.expected(question)
        == generate_with_transformers(cluster.oracle, list(question.prompt), ANSWER_TOKENS)
        for question in QUESTIONS
        if not question.temperature
    )


async def test_a_node_dies_and_another_takes_its_place(cluster: Cluster) -> None:
    lost = cluster.workers_of("one")
    assert {name.partition("-")[0] for name in lost} == {"prefill", "decode"}
    left = cluster.incarnations()
    async with SteadyLoad(cluster.serve.address) as load:
        assert same_as_transformers(cluster, load)
        await load.more()
        began = time.monotonic()
        cluster.ray.kill("one")
        # There is no room for what was there until a node is added.
        await load.more(20)
        assert load.moved
        await asyncio.to_thread(cluster.ray.add, "three", 2)
        await cluster.until_whole()
        took = time.monotonic() - began
        await load.more()
    assert cluster.workers_of("three") == lost
    after = cluster.incarnations()
    assert {name for name, number in after.items() if left[name] != number} == lost
    recoveries.note("a node dies; another is added, and its workers start there", took, load)


async def test_serving_goes_on_without_the_controller_and_rays_directory(
    cluster: Cluster, redis: None
) -> None:
    before, controller = cluster.incarnations(), cluster.controller()
    async with SteadyLoad(cluster.serve.address) as load:
        await load.more()
        cluster.ray.kill_gcs()
        os.kill(controller, signal.SIGKILL)
        # Ray cannot start the controller again.
        await load.more(20)
        assert not cluster.controller()
        began = time.monotonic()
        await asyncio.to_thread(cluster.ray.restart_gcs)
        await cluster.until(lambda: bool(cluster.controller()))
        took = time.monotonic() - began
        assert cluster.incarnations() == before
        assert not load.moved
        # The pools are cared for again: a worker that dies comes back.
        os.kill(cluster.pid("decode-0"), signal.SIGKILL)
        await cluster.until(lambda: cluster.incarnations().get("decode-0") != before["decode-0"])
        await cluster.until_whole()
        await load.more()
    recoveries.note("Ray's directory and the controller are down, then it starts again", took, load)


async def test_a_rolling_restart_loses_nothing(cluster: Cluster) -> None:
    before = cluster.incarnations()
    async with SteadyLoad(cluster.serve.address) as load:
        await load.more()
        began = time.monotonic()
        said = await asyncio.to_thread(cluster.serve.ask, "restart")
        took = time.monotonic() - began
        await load.more()
    order = [line.split()[0] for line in said.splitlines()]
    assert order == ["prefill-0", "decode-0", "prefill-1", "decode-1"]
    after = cluster.incarnations()
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    recoveries.note("`baton restart`: four workers, one after the other", took, load)

"""A cluster on a Ray of several nodes, while nodes, the controller and Ray's own head come and go.

Every answer must be complete and the undisturbed one. `make test-fleet` runs this file, and
prints how long each recovery took.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import recoveries
import yaml
from processes import free_port
from ray.util import get_node_ip_address
from ray_nodes import TOKEN, RayNodes, why_no_redis
from serving import BATON, FREE_PORTS, Command
from steady_load import ANSWER_TOKENS, QUESTIONS, SteadyLoad
from tiny_models import TINY_MODELS, generate_with_transformers, save
from transformers import PreTrainedModel

from baton import Client, Unavailable
from baton.v1.cluster_pb2 import StatusResponse, WorkerStatus

pytestmark = pytest.mark.fleet

RECOVERY_SECONDS = 120.0
COMMAND_SECONDS = 240.0
"""Commands wait ten minutes for nodes. pytest's limit ends no thread that waits for one."""
POOL = {"workers": 2, "gpus": 1, "kv_memory": "4MiB", "threads": 1}


@dataclass(frozen=True)
class Cluster:
    ray: RayNodes
    # Of `baton serve`, which can be started again.
    flags: list[str]
    # Of a router outside Ray.
    address: str
    oracle: PreTrainedModel

    def ask(self, *arguments: str) -> str:
        """What `baton …`, asked of the router, prints."""
        return baton(*arguments, "--address", self.address)

    def status(self) -> StatusResponse:
        with Client(self.address) as client:
            return client.status()

    def workers(self) -> dict[str, WorkerStatus]:
        """Those that are attached, by name."""
        found = self.status().workers
        return {each.member.worker_id: each for each in found if each.attached}

    def workers_of(self, node: str) -> set[str]:
        return self.ray.nodes[node].workers(self.status())

    def incarnations(self) -> dict[str, int]:
        """Of each worker, what tells its process from others."""
        return {name: worker.incarnation for name, worker in self.workers().items()}

    def silent(self) -> set[str]:
        """The workers that do not serve, as the controller sees it."""
        with Client(self.address) as client:
            return {each.worker_id for each in client.pools().workers if not each.ready}

    def controller(self) -> int:
        """The controller's process; 0 while there is none."""
        if "head" not in self.ray.nodes:
            return 0
        processes = self.ray.nodes["head"].processes().items()
        return next((pid for pid, line in processes if line == "ray::Controller"), 0)

    def is_controlled(self) -> bool:
        """Whether the controller answers the router."""
        with Client(self.address) as client:
            try:
                client.pools()
            except Unavailable:
                return False
        return True

    def are_busy(self, names: set[str]) -> bool:
        """Whether each of these workers has something under way."""
        workers = self.workers()
        return all(workers[name].active_requests for name in names)

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + RECOVERY_SECONDS
        while not await asyncio.to_thread(condition):
            assert time.monotonic() < deadline, self.workers()
            await asyncio.sleep(0.3)

    async def until_whole(self) -> None:
        """Returns when every worker of both pools is used."""
        await self.until(self._is_whole)

    def _is_whole(self) -> bool:
        workers = self.workers()
        connected = [len(each.connected) for each in workers.values() if each.connected]
        return len(workers) == 4 and connected == [2, 2]


def baton(*arguments: str) -> str:
    environment = {**os.environ, **TOKEN}
    ended = subprocess.run(
        [BATON, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=COMMAND_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers on each of two nodes; the controller is on the head."""
    folder = tmp_path_factory.mktemp("nodes")
    oracle = save(TINY_MODELS["llama"], folder / "model")
    controller = f"{get_node_ip_address()}:{free_port()}"
    settings = {
        "insecure": True,
        "device": "cpu",
        "model": str(folder / "model"),
        "controller": {"port": int(controller.rpartition(":")[2])},
        "prefill": POOL,
        "decode": POOL,
        "router": {"local_prefill": "fallback", "port": 0, "http_port": 0, "metrics_port": 0},
    }
    config = folder / "baton.yaml"
    config.write_text(yaml.safe_dump(settings))
    with RayNodes(redis=not why_no_redis()) as ray:
        for name in ("one", "two"):
            ray.add(name, slots=2)
        there = ["--ray-address", ray.address, "--detach", "--name", "nodes"]
        flags = [*FREE_PORTS, "--config", str(config), *there]
        baton("serve", *flags)
        with router(folder, config, controller) as address:
            found = Cluster(ray, flags, address, oracle)
            asyncio.run(found.until_whole())
            yield found


@contextmanager
def router(folder: Path, config: Path, controller: str) -> Iterator[str]:
    """The address of a router that follows the controller and is no part of Ray."""
    arguments = ["-m", "baton.router", "--config", str(config), "--controller", controller]
    command = Command(folder / "router", [sys.executable, *arguments])
    try:
        said = re.search(r"gRPC on (\S+),", command.wait_for("router ready"))
        assert said
        yield said[1]
    finally:
        command.end()


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
    before = cluster.incarnations()
    async with SteadyLoad(cluster.address) as load:
        assert same_as_transformers(cluster, load)
        await load.more()
        await cluster.until(lambda: cluster.are_busy(lost))
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
    assert changed(before, cluster.incarnations()) == lost
    recoveries.note("a node dies; another is added, and its workers start there", took, load)


def changed(before: dict[str, int], after: dict[str, int]) -> set[str]:
    """The workers that are other processes now."""
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


async def test_serving_goes_on_without_the_controller_and_rays_directory(
    cluster: Cluster, redis: None
) -> None:
    before = cluster.incarnations()
    async with SteadyLoad(cluster.address) as load:
        await load.more()
        cluster.ray.kill_gcs()
        os.kill(cluster.controller(), signal.SIGKILL)
        # Ray cannot start the controller again.
        await load.more(20)
        assert not cluster.controller()
        began = time.monotonic()
        await asyncio.to_thread(cluster.ray.restart_gcs)
        took = await until_controlled(cluster, load, before) - began
    recoveries.note("the controller and Ray's directory die, which starts again", took, load)


async def until_controlled(cluster: Cluster, load: SteadyLoad, before: dict[str, int]) -> float:
    """When the controller was back. It has changed nothing, and can change the pools again."""
    await cluster.until(cluster.is_controlled)
    back = time.monotonic()
    await load.more()
    assert not load.moved
    assert not changed(before, cluster.incarnations())
    await asyncio.to_thread(cluster.ask, "scale", "--decode", "1")
    await cluster.until(lambda: len(cluster.workers()) == 3)
    await asyncio.to_thread(cluster.ask, "scale", "--decode", "2")
    await cluster.until_whole()
    return back


async def test_serving_goes_on_without_the_head(cluster: Cluster, redis: None) -> None:
    before = cluster.incarnations()
    async with SteadyLoad(cluster.address) as load:
        await load.more()
        cluster.ray.kill("head")
        await load.more(20)
        began = time.monotonic()
        await asyncio.to_thread(cluster.ray.start_head)
        took = await until_controlled(cluster, load, before) - began
        whole = cluster.incarnations()
        said = await asyncio.to_thread(baton, "serve", *cluster.flags)
        assert "baton-nodes is already running and keeps running" in said
        assert not changed(whole, cluster.incarnations())
    recoveries.note("Ray's head dies, with the controller, and starts again", took, load)


async def test_a_rolling_restart_loses_nothing(cluster: Cluster) -> None:
    before = cluster.incarnations()
    async with SteadyLoad(cluster.address) as load:
        await load.more()
        began = time.monotonic()
        said = await asyncio.to_thread(cluster.ask, "restart")
        took = time.monotonic() - began
        await load.more()
    roles = [line.partition("-")[0] for line in said.splitlines()]
    assert roles == ["prefill", "decode", "prefill", "decode"]
    assert changed(before, cluster.incarnations()) == before.keys()
    recoveries.note("`baton restart`: four workers, one after the other", took, load)


async def test_a_node_leaves_and_its_workers_go_elsewhere(cluster: Cluster) -> None:
    leaving = cluster.ray.nodes["two"]
    names, before = cluster.workers_of("two"), cluster.incarnations()
    async with SteadyLoad(cluster.address) as load:
        await load.more()
        await asyncio.to_thread(cluster.ray.add, "four", 2)
        began = time.monotonic()
        flags = ["--ray-address", cluster.ray.address, "--host", leaving.host]
        said = await asyncio.to_thread(baton, "leave", *flags)
        assert not cluster.workers_of("two")
        await cluster.until_whole()
        took = time.monotonic() - began
        await load.more()
    assert {line.split()[0] for line in said.splitlines()} == names
    assert cluster.workers_of("four") == names
    assert changed(before, cluster.incarnations()) == names
    recoveries.note("`baton leave` on a node; its workers start on another", took, load)


async def test_pools_made_smaller_after_a_loss_keep_the_workers_that_live(
    cluster: Cluster,
) -> None:
    lost, before = cluster.workers_of("four"), cluster.incarnations()
    assert {name.partition("-")[0] for name in lost} == {"prefill", "decode"}
    async with SteadyLoad(cluster.address) as load:
        await load.more()
        cluster.ray.kill("four")
        await cluster.until(lambda: cluster.silent() == lost)
        await asyncio.to_thread(cluster.ask, "scale", "--prefill", "1", "--decode", "1")
        await load.more()
        assert cluster.incarnations() == {name: before[name] for name in before.keys() - lost}
        await asyncio.to_thread(cluster.ray.add, "five", 2)
        await asyncio.to_thread(cluster.ask, "scale", "--prefill", "2", "--decode", "2")
        await cluster.until_whole()
        await load.more()

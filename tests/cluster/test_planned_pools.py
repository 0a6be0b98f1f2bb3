"""The planner on a live cluster: it adds workers, also where no node has room for them yet, and
drains them again. Every answer meanwhile is the undisturbed one. `make test-fleet` runs this file.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import recoveries
import yaml
from ray_nodes import TOKEN, RayNodes
from serving import Serve
from steady_load import SteadyLoad
from tiny_models import TINY_MODELS, save

from baton import Client, Unavailable
from baton.v1.cluster_pb2 import PoolsResponse

pytestmark = pytest.mark.fleet

CHANGE_SECONDS = 150.0
POOL: dict[str, object] = {"kv_memory": "4MiB", "threads": 1}
SETTINGS: dict[str, object] = {
    # Batches of more than four are not allowed, so that a few askers are too many for a worker.
    "planner": {"enabled": True, "round_seconds": 0.5, "most_workers": 4, "itl": 10.0},
    "prefill": POOL,
    "decode": {**POOL, "nice": 0, "max_batch": 4},
}
# Ray takes a slot for a GPU, our configuration for a CPU. One answer at a time, so that a few
# askers are too many for a worker, and for two, for as long as nodes take to come.
ON_NODES: dict[str, object] = {
    **SETTINGS,
    "insecure": True,
    "device": "cpu",
    "prefill": {**POOL, "gpus": 1},
    "decode": {**POOL, "nice": 0, "max_batch": 1, "gpus": 1},
}


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    folder = tmp_path_factory.mktemp("planned")
    with Serve(folder, "--config", str(write(folder, SETTINGS))) as cluster:
        yield cluster.ready()


def write(folder: Path, settings: dict[str, object]) -> Path:
    """A file with the settings of a cluster, and the model that it serves."""
    save(TINY_MODELS["llama"], folder / "model")
    config = folder / "baton.yaml"
    config.write_text(yaml.safe_dump({**settings, "model": str(folder / "model")}))
    return config


def pools(address: str) -> PoolsResponse:
    with Client(address) as client:
        return client.pools()


def serving(address: str) -> tuple[int, int]:
    """The workers of each role that there are to be, once all serve and nobody else is left."""
    try:
        now = pools(address)
    except Unavailable:  # while nodes start, the controller may be too slow to answer
        return (0, 0)
    whole = all(worker.ready for worker in now.workers)
    return (now.prefill, now.decode) if whole else (0, 0)


def decided(address: str) -> list[str]:
    """What was changed, the latest first."""
    with Client(address) as client:
        return [change.summary for change in client.plan().changes]


async def until(condition: Callable[[], bool], load: SteadyLoad) -> float:
    """How long it took, while answers kept coming."""
    began = time.monotonic()
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < began + CHANGE_SECONDS
        await load.more(1)
    return time.monotonic() - began


async def test_workers_are_added_while_there_are_too_few(serve: Serve) -> None:
    address = serve.address
    async with SteadyLoad(address, at_once=6, pause=0.05) as load:
        took = await until(lambda: serving(address) == (1, 3), load)
        await load.more(20)
    assert any(words.startswith("add ") and "decode" in words for words in decided(address))
    assert len({decode for _, decode in load.pairs}) == 3
    recoveries.note("the planner adds two decode workers", took, load)


async def test_workers_are_drained_once_there_are_too_many(serve: Serve) -> None:
    address = serve.address
    async with SteadyLoad(address, at_once=1, pause=2.0) as load:
        took = await until(lambda: serving(address) == (1, 1), load)
        await load.more(1)
    assert any(words.startswith("drain ") for words in decided(address))
    serve.wait_whole(2)
    recoveries.note("the planner drains two decode workers that are idle", took, load)


async def test_nodes_are_asked_for_where_none_has_room_and_go_when_they_are_idle(
    tmp_path: Path,
) -> None:
    flags = ["--config", str(write(tmp_path, ON_NODES))]
    with (
        RayNodes(most_nodes=4) as ray,
        Serve(tmp_path, *flags, "--ray-address", ray.address, environment=TOKEN) as serve,
    ):
        address = serve.ready().address
        assert ray.added() == 2
        async with SteadyLoad(address, at_once=8, pause=0.05) as load:
            took = await until(lambda: serving(address) == (1, 3), load)
            await load.more()
        assert ray.added() == 4
        assert re.search("decode-1 +waiting for a place", serve.stdout)
        recoveries.note("the planner adds two workers; Ray adds the nodes for them", took, load)
        async with SteadyLoad(address, at_once=1, pause=4.0) as load:
            took = await until(lambda: ray.added() == 2, load)
            assert serving(address) == (1, 1)
            await load.more(1)
        recoveries.note("the planner drains them, and Ray takes the nodes away", took, load)

"""Old and new versions of workers in one cluster: only what fits is paired, and nothing is lost.

Another version is the same code with another number in it, set when a process starts.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest
from processes import ProcessCluster, second_router
from steady_load import SteadyLoad
from waiting import until

from baton import AsyncClient
from baton.core.types import PROTOCOL
from baton.kv_transfer.transfer_protocol import TICKET_VERSION
from baton.v1.worker_pb2 import ROLE_PREFILL

pytestmark = pytest.mark.fleet

SECTION = {"kv_memory": "4MiB", "threads": 1}
TREE: dict[str, object] = {"prefill": SECTION, "decode": SECTION}
NEW = ("prefill-1", "decode-1")
SAME_VERSION = {("prefill-0", "decode-0"), ("prefill-1", "decode-1")}


def next_version(folder: Path, module: str, name: str) -> list[str]:
    """What to put in front of a command that is to run with a number one higher."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import {module}\n{module}.{name} += 1\n")
    return ["env", f"PYTHONPATH={folder}:{os.environ.get('PYTHONPATH', os.getcwd())}"]


async def misfits(client: AsyncClient) -> dict[str, dict[str, str]]:
    """By worker, whom it cannot exchange pages with, and why."""
    workers = (await client.status()).workers
    return {
        worker.member.worker_id: {each.worker_id: each.reason for each in worker.misfits}
        for worker in workers
    }


async def paired(client: AsyncClient) -> bool:
    """Whether every prefill worker knows of every decode worker whether it fits."""
    workers = (await client.status()).workers
    prefill = [worker for worker in workers if worker.member.role == ROLE_PREFILL]
    return sum(len(worker.connected) + len(worker.misfits) for worker in prefill) == 4


async def test_workers_of_two_layouts_serve_side_by_side(tiny: Path, tmp_path: Path) -> None:
    per_worker: dict[str, dict[str, object]] = {name: {"page_size": 32} for name in NEW}
    with ProcessCluster(
        *(tiny, tmp_path),
        prefill=2,
        decode=2,
        tree=TREE,
        per_worker=per_worker,
        wait_ready=False,
    ) as cluster:
        async with AsyncClient(cluster.address) as client:
            await client.wait_ready()
            await until(lambda: paired(client))
            async with SteadyLoad(cluster.address) as load:
                await load.more(24)
            assert load.pairs == SAME_VERSION
            found = await misfits(client)
            reason = "the pools have different layouts: page_size is 32 here and 16 there"
            assert found["prefill-1"] == {"decode-0": reason}
            assert found["decode-0"] == {"prefill-1": reason}
            assert not any(worker.fault for worker in (await client.status()).workers)
        cluster.wait_idle()


async def test_an_upgrade_of_one_worker_after_the_other_loses_nothing(
    tiny: Path, tmp_path: Path
) -> None:
    before: dict[str, list[str]] = {}
    new = next_version(tmp_path / "new", "baton.kv_transfer.transfer_protocol", "TICKET_VERSION")
    with ProcessCluster(tiny, tmp_path, prefill=2, decode=2, tree=TREE, before=before) as cluster:
        async with AsyncClient(cluster.address) as client, SteadyLoad(cluster.address) as load:
            await load.more()
            for name in ("prefill-0", "decode-0", "prefill-1", "decode-1"):
                before[name] = new
                await client.drain(name, restart=True)
                await asyncio.to_thread(cluster.restart, name)
                await until(lambda: paired(client))
                if name == "decode-0":
                    ours, theirs = TICKET_VERSION, TICKET_VERSION + 1
                    reason = f"tickets have version {ours} here and {theirs} there"
                    assert (await misfits(client))["prefill-1"] == {"decode-0": reason}
                    load.pairs = set()
                    await load.more(24)
                    assert load.pairs == SAME_VERSION
            load.pairs = set()
            await load.more(24)
            assert len(load.pairs) == 4
        cluster.wait_idle()


async def test_routers_of_two_protocols_use_the_workers_that_speak_theirs(
    tiny: Path, tmp_path: Path
) -> None:
    new = next_version(tmp_path / "new", "baton.core.types", "PROTOCOL")
    with (
        ProcessCluster(
            *(tiny, tmp_path),
            prefill=2,
            decode=2,
            tree=TREE,
            before=dict.fromkeys(NEW, new),
            wait_ready=False,
        ) as cluster,
        second_router(tmp_path, new) as address,
    ):
        for router, names in ((cluster.address, ("prefill-0", "decode-0")), (address, NEW)):
            async with AsyncClient(router) as client:
                await client.wait_ready()
                async with SteadyLoad(router) as load:
                    await load.more()
                assert load.pairs == {names}
                faults = [each.fault for each in (await client.status()).workers if each.fault]
                assert len(faults) == 2
                for fault in faults:
                    assert re.fullmatch(r"this worker speaks protocol \d, the router \d", fault)
                    assert str(PROTOCOL + 1) in fault

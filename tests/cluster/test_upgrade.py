"""A rolling upgrade under load, from the last tagged version to this one, as RELIABILITY.md says.

BATON_UPGRADE_FROM names another revision to begin with.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from processes import ProcessCluster, second_router
from steady_load import QUESTIONS, SteadyLoad
from waiting import until

from baton import AsyncClient
from baton.v1.worker_pb2 import ROLE_PREFILL

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SECTION = {"kv_memory": "4MiB", "threads": 1}
TREE: dict[str, object] = {"prefill": SECTION, "decode": SECTION}
WORKERS = ("prefill-0", "decode-0", "prefill-1", "decode-1")


def git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout.strip()


@pytest.fixture
def old(tmp_path: Path) -> list[str]:
    """What to put in front of a command that is to run the old version."""
    revision = os.environ.get("BATON_UPGRADE_FROM") or git("describe", "--tags", "--abbrev=0")
    if not revision:
        pytest.skip("there is no tagged version to upgrade from")
    folder = tmp_path / "old"
    folder.mkdir()
    packed = subprocess.run(["git", "archive", revision], cwd=ROOT, stdout=subprocess.PIPE)
    assert packed.returncode == 0, f"{revision} is not a revision"
    subprocess.run(["tar", "-x"], cwd=folder, input=packed.stdout, check=True)
    # Python looks in the working folder first.
    return ["env", "-C", str(folder), f"PYTHONPATH={folder}"]


async def upgrade(cluster: ProcessCluster, client: AsyncClient, *names: str) -> None:
    for name in names:
        await client.drain(name, restart=True)
        await asyncio.to_thread(cluster.restart, name)


async def has_pair(client: AsyncClient, names: set[str]) -> bool:
    """Whether the router can use one of these workers for each phase."""
    workers = [each for each in (await client.status()).workers if each.member.worker_id in names]
    usable = [each for each in workers if each.attached and not each.fault]
    prefill = [each for each in usable if each.member.role == ROLE_PREFILL]
    return any(set(each.connected) & names for each in prefill)


async def test_an_upgrade_from_the_last_version_loses_nothing(
    tiny: Path, tmp_path: Path, old: list[str]
) -> None:
    before = dict.fromkeys((*WORKERS, "router"), old)
    with ProcessCluster(
        tiny, tmp_path / "cluster", prefill=2, decode=2, tree=TREE, before=before
    ) as cluster:
        async with AsyncClient(cluster.address) as client:
            async with SteadyLoad(cluster.address) as load:
                await load.more()
                before.update({name: ["env"] for name in WORKERS})
                await upgrade(cluster, client, "prefill-0", "decode-0")
                await load.more(24)
            # Clients move to the new router, which has a pair of its own version.
            with second_router(tmp_path / "cluster", ["env"]) as address:
                async with AsyncClient(address) as newer:
                    await until(lambda: has_pair(newer, {"prefill-0", "decode-0"}))
                    async with SteadyLoad(address) as after:
                        await upgrade(cluster, client, "prefill-1", "decode-1")
                        await until(lambda: has_pair(newer, {"prefill-1", "decode-1"}))
                        await after.more(24)
            for question in QUESTIONS:
                assert after.expected(question) == load.expected(question)

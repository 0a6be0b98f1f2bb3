"""Workers hear of ended processes, over real streams to scripted workers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from scripted_worker import ScriptedWorker
from waiting import until

from baton.core.config import Config, RouterConfig
from baton.core.types import Role
from baton.router.workers.membership import Membership


@pytest.fixture
async def membership() -> AsyncIterator[Membership]:
    pings = RouterConfig(ping_seconds=0.05, frozen_seconds=0.3)
    membership = Membership("router", "tiny", Config(router=pings))
    yield membership
    await membership.stop()


def told(worker: ScriptedWorker) -> list[str]:
    gone = [message for message in worker.received if message.HasField("sender_gone")]
    return [message.sender_gone.agent for message in gone]


async def test_every_worker_is_told_once_also_one_that_attaches_later(
    membership: Membership,
) -> None:
    early, late = ScriptedWorker(name="early"), ScriptedWorker(name="late")
    prefill = ScriptedWorker(Role.PREFILL)
    addresses = [await worker.start() for worker in (early, prefill)]

    async def is_told(worker: ScriptedWorker) -> bool:
        return bool(told(worker))

    membership.set_addresses(addresses)
    await membership.wait_until(lambda: sum(link.usable for link in membership.links) == 2)
    membership.note_ended(["an agent"])
    membership.note_ended(["an agent"])
    await until(lambda: is_told(early))
    membership.set_addresses([*addresses, await late.start()])
    await until(lambda: is_told(late))
    await until(lambda: is_told(prefill))
    assert [told(worker) for worker in (early, late, prefill)] == 3 * [["an agent"]]
    for worker in (early, late, prefill):
        await worker.stop()


async def test_a_worker_is_told_again_on_a_new_stream(membership: Membership) -> None:
    worker = ScriptedWorker()
    membership.note_ended(["an agent"])
    membership.set_addresses([await worker.start()])

    async def is_told(times: int) -> bool:
        return len(told(worker)) == times

    await until(lambda: is_told(1))
    worker.answers_pings = worker.reports = False
    await until(lambda: is_told(2))
    await worker.stop()

"""Waiting for workers, with a real membership and scripted workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from scripted_worker import ScriptedWorker

from baton.core.config import Config, RouterConfig
from baton.core.errors import Unavailable
from baton.core.types import AttemptKey, Sampling, Work
from baton.router.observe.metrics import RouterMetrics
from baton.router.placement.placer import Placer
from baton.router.requests.admission import Admission, Assignment
from baton.router.requests.retries import RetryLimits, RetryState
from baton.router.workers.membership import Membership

PLACEMENT_SECONDS = 0.5
CONFIG = RouterConfig(
    placement_timeout=PLACEMENT_SECONDS,
    queue_timeout=30.0,
    local_prefill="always",
    local_prefill_after=0.0,
    worker_backlog=1,
)


@pytest.fixture
async def membership() -> AsyncIterator[Membership]:
    membership = Membership("router", "tiny", Config(router=CONFIG))
    yield membership
    await membership.stop()


async def assigned(admission: Admission) -> Assignment:
    work = Work(AttemptKey("r", 1), [1, 2], Sampling(), 8, frozenset())
    return await admission.assign(admission.arrive(), RetryState(work, RetryLimits(2, 8)))


async def waiting_behind_another(membership: Membership, address: str) -> asyncio.Task[Assignment]:
    """A request that has waited for its turn longer than it would wait for workers."""
    placer = Placer(membership, CONFIG)
    admission = Admission(membership, placer, CONFIG, RouterMetrics())
    membership.set_addresses([address])
    await membership.wait_until(lambda: placer.can_place)
    first = await assigned(admission)
    first.responder.assigned.count_unanswered(+1)
    waiting = asyncio.create_task(assigned(admission))
    await asyncio.sleep(PLACEMENT_SECONDS + 0.1)
    assert not waiting.done()
    first.responder.assigned.count_unanswered(-1)
    return waiting


async def test_who_waits_for_its_turn_waits_for_a_worker_that_comes_back_too(
    membership: Membership,
) -> None:
    worker = ScriptedWorker()
    waiting = await waiting_behind_another(membership, address := await worker.start())
    await worker.stop()
    await membership.wait_until(lambda: membership.find("decode-0") is None)
    again = ScriptedWorker()
    await again.start(port=int(address.rpartition(":")[2]))
    assert (await waiting).placement.decode == "decode-0"
    await again.stop()


async def test_a_queued_request_fails_when_no_worker_comes_back(
    membership: Membership,
) -> None:
    worker = ScriptedWorker()
    waiting = await waiting_behind_another(membership, await worker.start())
    await worker.stop()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(waiting, 10.0)

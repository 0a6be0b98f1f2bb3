"""Waiting for workers, with a real membership and scripted workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from scripted_worker import ScriptedWorker

from baton.core.config import Config, RouterConfig
from baton.core.errors import Exhausted, Unavailable
from baton.core.types import AttemptKey, Sampling, Work
from baton.router.observe.metrics import RouterMetrics
from baton.router.placement.placer import Placer
from baton.router.requests.admission import Admission, Assignment, WaitQueue
from baton.router.requests.attempt import RetryState
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
    state = RetryState(work, max_deaths=2, max_attempts=8)
    return await admission.assign(admission.arrive(), state)


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


async def test_a_queued_request_waits_for_a_worker_that_comes_back(
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


def test_the_first_to_arrive_is_the_head() -> None:
    queue = WaitQueue(limit=10)
    for order in (1, 2, 3):
        queue.join(order)
    assert queue.head == 1
    queue.leave(1)
    assert queue.head == 2


def test_a_retry_keeps_its_requests_place() -> None:
    queue = WaitQueue(limit=10)
    queue.join(5)
    queue.join(6)
    queue.join(2, retry=True)
    assert queue.head == 2


def test_a_full_queue_refuses_and_says_when_to_retry() -> None:
    queue = WaitQueue(limit=2)
    queue.join(1)
    queue.join(2)
    with pytest.raises(Exhausted) as refused:
        queue.join(3)
    assert refused.value.retry_after == 1.0


def test_a_full_queue_admits_a_retry() -> None:
    queue = WaitQueue(limit=1)
    queue.join(4)
    queue.join(3, retry=True)
    assert len(queue) == 2


def test_the_wait_is_estimated_from_the_rate_of_admissions() -> None:
    queue = WaitQueue(limit=100)
    for order in range(10):
        queue.join(order)
    for now in range(0, 200, 2):
        queue.admitted(float(now))
    assert queue.retry_after == pytest.approx(20.0, rel=0.01)


def test_an_estimate_has_bounds() -> None:
    queue = WaitQueue(limit=100)
    queue.join(1)
    queue.admitted(0.0)
    queue.admitted(10_000.0)
    assert queue.retry_after == 60.0

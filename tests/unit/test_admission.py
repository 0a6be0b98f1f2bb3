"""Waiting for workers, with a real membership and scripted workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from scripted_worker import ScriptedWorker

from baton.core.config import Config, RouterConfig
from baton.core.errors import Exhausted, Unavailable
from baton.core.tasks import cancel_all
from baton.core.types import AttemptKey, Sampling, Work
from baton.router.observe.metrics import RouterMetrics
from baton.router.placement.placer import Placer
from baton.router.requests.admission import Admission, Assignment, Place, WaitQueue
from baton.router.requests.retries import RetryState
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


async def assigned(admission: Admission, priority: int = 0, tenant: str = "") -> Assignment:
    work = Work(AttemptKey("r", 1), [1, 2], Sampling(), 8, frozenset())
    state = RetryState(work, max_deaths=2, max_attempts=8)
    return await admission.assign(admission.arrive(priority, tenant), state)


async def with_busy_worker(
    membership: Membership, address: str, config: RouterConfig = CONFIG
) -> tuple[Admission, Assignment]:
    """An admission whose one worker has no room, and the request on it."""
    placer = Placer(membership, config)
    admission = Admission(membership, placer, config, RouterMetrics())
    membership.set_addresses([address])
    await membership.wait_until(lambda: placer.can_place)
    first = await assigned(admission)
    first.responder.assigned.count_unanswered(+1)
    return admission, first


async def waiting_behind_another(membership: Membership, address: str) -> asyncio.Task[Assignment]:
    """A request that has waited for its turn longer than it would wait for workers."""
    admission, first = await with_busy_worker(membership, address)
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


async def test_a_full_queue_refuses_a_waiting_request_for_an_earlier_one(
    membership: Membership,
) -> None:
    worker = ScriptedWorker()
    config = replace(CONFIG, max_queued=1)
    admission, first = await with_busy_worker(membership, await worker.start(), config)
    batch = asyncio.create_task(assigned(admission, priority=1000))
    await asyncio.sleep(0)
    assert admission.priorities == {1000: 1}
    live = asyncio.create_task(assigned(admission))
    with pytest.raises(Exhausted, match="requests of others go first"):
        await batch
    assert admission.queued == 1
    first.responder.assigned.count_unanswered(-1)
    admission.wake()
    assert (await live).placement.decode == "decode-0"
    await worker.stop()


async def test_a_full_router_makes_room_for_a_tenant_with_fewer_requests(
    membership: Membership,
) -> None:
    worker = ScriptedWorker()
    admission, _ = await with_busy_worker(membership, await worker.start())
    waiting = [asyncio.create_task(assigned(admission, tenant="busy")) for _ in range(3)]
    await asyncio.sleep(0)
    assert not admission.make_room(0, "busy")
    assert admission.make_room(0, "single")
    with pytest.raises(Exhausted):
        await waiting.pop()
    await cancel_all(*waiting)
    await worker.stop()


def place(order: int, tenant: str = "", priority: int = 0) -> Place:
    return Place(priority, order, tenant)


def queued(*places: Place, limit: int = 10_000) -> WaitQueue:
    queue = WaitQueue(limit)
    for each in places:
        queue.join(each)
    return queue


def admission_order(queue: WaitQueue) -> list[Place]:
    """The order in which the queue's requests are admitted."""
    admitted = []
    while head := queue.head:
        queue.admitted(head, 0.0)
        queue.leave(head)
        admitted.append(head)
    return admitted


def test_the_first_to_arrive_is_the_head() -> None:
    assert [each.order for each in admission_order(queued(place(2), place(1)))] == [1, 2]


def test_the_lowest_priority_is_the_head() -> None:
    queue = queued(place(1, priority=1000), place(2), place(3, priority=-1), place(4))
    assert [each.order for each in admission_order(queue)] == [3, 2, 4, 1]


def test_tenants_take_turns() -> None:
    queue = queued(*(place(order, "busy") for order in range(1000)), place(1000, "single"))
    assert [each.tenant for each in admission_order(queue)[:3]] == ["busy", "single", "busy"]


def test_a_turn_is_kept_when_a_request_leaves() -> None:
    queue = queued(place(1, "a"), place(2, "b"), place(3, "b"), place(4, "a"))
    queue.leave(place(1, "a"))
    assert [each.order for each in admission_order(queue)] == [4, 2, 3]


def test_a_retry_keeps_its_requests_place() -> None:
    queue = queued(place(5), place(6))
    queue.join(place(2), retry=True)
    assert queue.head == place(2)


def test_a_full_queue_refuses_and_says_when_to_retry() -> None:
    queue = queued(place(1), place(2), limit=2)
    with pytest.raises(Exhausted) as refused:
        queue.join(place(3))
    assert refused.value.retry_after == 1.0


def test_a_full_queue_admits_a_retry() -> None:
    queue = queued(place(4), limit=1)
    queue.join(place(3), retry=True)
    assert len(queue) == 2


def test_a_full_queue_refuses_the_last_of_a_later_priority_instead() -> None:
    queue = queued(place(1, priority=5), place(2, priority=5), limit=2)
    assert queue.join(place(3)) == place(2, priority=5)
    assert [each.order for each in admission_order(queue)] == [3, 1]


def test_a_full_queue_refuses_the_tenant_with_most_requests_instead() -> None:
    queue = queued(place(1, "busy"), place(2, "busy"), place(3, "busy"), limit=3)
    assert queue.join(place(4, "single")) == place(3, "busy")
    with pytest.raises(Exhausted):
        queue.join(place(5, "single"))


def test_a_full_queue_refuses_no_retry_and_no_earlier_priority() -> None:
    queue = queued(place(1), limit=1)
    with pytest.raises(Exhausted):
        queue.join(place(2, "other", priority=1))
    queue = queued(limit=1)
    queue.join(place(1, priority=1), retry=True)
    with pytest.raises(Exhausted):
        queue.join(place(2))


def test_waiting_requests_are_counted_by_priority() -> None:
    queue = queued(place(1, "a", 5), place(2), place(3, "b", 5))
    assert list(queue.priorities.items()) == [(0, 1), (5, 2)]


def test_the_wait_is_estimated_from_the_rate_of_admissions() -> None:
    queue = queued(*map(place, range(10)))
    for now in range(0, 200, 2):
        queue.admitted(place(0), float(now))
    assert queue.retry_after == pytest.approx(20.0, rel=0.01)


def test_an_estimate_has_bounds() -> None:
    queue = queued(place(1))
    queue.admitted(place(1), 0.0)
    queue.admitted(place(1), 10_000.0)
    assert queue.retry_after == 60.0

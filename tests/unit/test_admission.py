"""Waiting for workers, with a real membership and scripted workers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from scripted_worker import ScriptedWorker

from baton.core.config import Config, RouterConfig
from baton.core.errors import DeadlineExceeded, Exhausted, Unavailable
from baton.core.process import cancel_all
from baton.core.types import AttemptKey, Request, Role, Sampling, Work
from baton.router.observe.metrics import RouterMetrics
from baton.router.placement.placer import Placer
from baton.router.requests.admission import Admission, Assignment
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


async def assigned(
    admission: Admission, priority: int = 0, tenant: str = "", deadline: float = math.inf
) -> Assignment:
    work = Work(AttemptKey("r", 1), [1, 2], Sampling(), 8, frozenset())
    state = RetryState(work, max_deaths=2, max_attempts=8)
    return await admission.assign(admission.arrive(priority, tenant), state, deadline)


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


async def test_a_worker_that_reports_a_fault_gets_nothing_until_it_reports_none(
    membership: Membership,
) -> None:
    worker = ScriptedWorker()
    config = replace(CONFIG, placement_timeout=30.0)
    admission, first = await with_busy_worker(membership, await worker.start(), config)
    first.responder.assigned.count_unanswered(-1)
    worker.fault = "7 of 12 pages are in quarantine"
    await membership.wait_until(lambda: not first.responder.usable)
    waiting = asyncio.create_task(assigned(admission))
    await asyncio.sleep(0)
    assert admission.queued == 1
    worker.fault = ""
    assert (await waiting).placement.decode == "decode-0"
    await worker.stop()


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


async def test_what_would_wait_too_long_is_refused_at_once(membership: Membership) -> None:
    worker = ScriptedWorker()
    admission, _ = await with_busy_worker(membership, await worker.start())
    waiting = asyncio.create_task(assigned(admission))
    await asyncio.sleep(0)
    # As if none had been admitted for longer than a request may wait.
    admission._queue._pace._since = time.monotonic() - 2 * CONFIG.queue_timeout
    with pytest.raises(Exhausted, match="would wait 60"):
        await assigned(admission)
    request = Request("r", (1, 2), Sampling(), 8)
    with pytest.raises(Exhausted, match="would wait 60"):
        admission.check_wait(request)
    admission._queue._pace._since = time.monotonic() - 15.0
    admission.check_wait(request)
    with pytest.raises(DeadlineExceeded, match="would wait 15") as refused:
        admission.check_wait(replace(request, deadline=time.monotonic() + 10.0))
    assert refused.value.retry_after
    assert admission.queued == 1
    await cancel_all(waiting)
    await worker.stop()


async def test_what_would_miss_the_objective_is_refused_at_once(membership: Membership) -> None:
    worker = ScriptedWorker()
    config = replace(CONFIG, ttft=10.0)
    admission, _ = await with_busy_worker(membership, await worker.start(), config)
    waiting = asyncio.create_task(assigned(admission))
    await asyncio.sleep(0)
    request = Request("r", (1, 2), Sampling(), 8)
    admission.check_wait(request)
    # As if none had been admitted for longer than the objective, less the caution.
    admission._queue._pace._since = time.monotonic() - 9.0
    with pytest.raises(Exhausted, match=r"would wait 9\.0 seconds, and 10 is the limit") as refused:
        admission.check_wait(request)
    assert refused.value.retry_after
    await cancel_all(waiting)
    await worker.stop()


async def test_prompts_that_wait_at_workers_count_for_the_objective(
    membership: Membership,
) -> None:
    worker = ScriptedWorker()
    config = replace(CONFIG, ttft=10.0)
    admission, first = await with_busy_worker(membership, await worker.start(), config)
    first.responder.assigned.count_unanswered(-1)
    costs = admission._placer.costs
    for tokens in (2, 200, 2000, 4000):
        costs.note_prompt(Role.DECODE, tokens, 0, 0, 1e-2 * tokens)
        costs.note_prompt(Role.DECODE, 2, 0, tokens, 1e-2 * tokens)
    prompt = first.responder.prompts.add(20_000, 0)
    with pytest.raises(Exhausted, match="the first token is predicted in"):
        await assigned(admission)
    first.responder.prompts.remove(prompt)
    assert (await assigned(admission)).placement.decode == "decode-0"
    # Its own prompt takes longer, whenever it comes.
    work = Work(AttemptKey("r", 1), [1] * 4000, Sampling(), 8, frozenset())
    state = RetryState(work, max_deaths=2, max_attempts=8)
    assert (await admission.assign(admission.arrive(), state)).placement.decode == "decode-0"
    await worker.stop()


async def test_a_queued_request_is_refused_once_its_deadline_is_too_near(
    membership: Membership,
) -> None:
    worker = ScriptedWorker()
    admission, first = await with_busy_worker(membership, await worker.start())
    costs = admission._placer.costs
    costs.note_prompt(Role.DECODE, 2, 0, 0, 1e-3)
    deadline = time.monotonic() + 20.0
    waiting = asyncio.create_task(assigned(admission, deadline=deadline))
    await asyncio.sleep(0)
    assert admission.queued == 1
    for _ in range(200):
        costs.note_prompt(Role.DECODE, 2, 0, 0, 60.0)
    first.responder.assigned.count_unanswered(-1)
    admission.wake()
    with pytest.raises(DeadlineExceeded) as refused:
        await waiting
    assert refused.value.retry_after
    await worker.stop()


async def test_a_full_router_makes_room_for_a_tenant_with_fewer_requests(
    membership: Membership,
) -> None:
    worker = ScriptedWorker()
    admission, _ = await with_busy_worker(membership, await worker.start())
    waiting = [asyncio.create_task(assigned(admission, tenant="busy")) for _ in range(3)]
    await asyncio.sleep(0)
    assert not admission.make_room(0, "busy", 1)
    assert not admission.make_room(0, "single", 3)
    assert admission.make_room(0, "single", 1)
    assert admission.make_room(0, "other", 2)  # for the first one, another leaves already
    for _ in range(2):
        with pytest.raises(Exhausted):
            await waiting.pop()
    await cancel_all(*waiting)
    await worker.stop()

"""Which workers hold their background requests, and where a router places these."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from scripted_worker import ScriptedWorker
from waiting import until

from baton.core.config import Config, RouterConfig
from baton.core.types import LAST_PRIORITY, AttemptKey, Role, Sampling, Work
from baton.router.observe.ledger import AnswerLedger
from baton.router.observe.metrics import RouterMetrics
from baton.router.placement.placement import Placement, Suspicion
from baton.router.placement.placer import Placer
from baton.router.requests.admission import Admission, Assignment
from baton.router.requests.dispatch import Dispatcher, RunningAttempt
from baton.router.workers import host_holds
from baton.router.workers.host_holds import HostHolds
from baton.router.workers.link import WorkerLink
from baton.router.workers.membership import Membership


@pytest.fixture(autouse=True)
def _no_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_holds, "LINGER_SECONDS", 0.0)


class CpuWorker(ScriptedWorker):
    device = "cpu"

    @property
    def holds(self) -> list[bool]:
        return [each.hold.pause for each in self.received if each.HasField("hold")]


class GpuWorker(CpuWorker):
    device = "cuda"


@asynccontextmanager
async def attached(*workers: ScriptedWorker) -> AsyncIterator[list[WorkerLink]]:
    """The links of a router's workers of two models, which share a host."""
    holds, memberships = HostHolds(), []
    for worker in workers:
        memberships.append(Membership("router", "tiny", Config(router=RouterConfig()), holds))
        memberships[-1].set_addresses([await worker.start()])
    try:
        links = [link for membership in memberships for link in membership.links]
        await until(lambda: all_usable(links))
        yield links
    finally:
        for membership in memberships:
            await membership.stop()
        for worker in workers:
            await worker.stop()


async def all_usable(links: list[WorkerLink]) -> bool:
    return all(link.usable for link in links)


async def has_holds(worker: CpuWorker, *holds: bool) -> bool:
    return worker.holds == list(holds)


async def test_workers_on_the_cores_of_a_request_hold_background_requests() -> None:
    prefill, decode = CpuWorker(Role.PREFILL), CpuWorker(Role.DECODE)
    async with attached(prefill, decode) as (one, other):
        assert one.has_room(background=True)
        other.count_live(+1)
        other.count_live(+1)
        await until(lambda: has_holds(prefill, True))
        await until(lambda: has_holds(decode, True))
        assert one.has_room()
        assert not one.has_room(background=True)
        other.count_live(-1)
        await asyncio.sleep(0)
        assert not one.has_room(background=True)
        other.count_live(-1)
        await until(lambda: has_holds(prefill, True, False))
        assert one.has_room(background=True)


async def test_a_worker_that_switched_its_role_is_told_again() -> None:
    worker = CpuWorker(Role.PREFILL)
    async with attached(worker) as (link,):
        link.count_live(+1)
        await until(lambda: has_holds(worker, True))
        await worker.become(Role.DECODE)
        await until(lambda: has_holds(worker, True, True))


async def test_gpus_are_shared_with_nobody() -> None:
    prefill, decode = GpuWorker(Role.PREFILL), GpuWorker(Role.DECODE)
    async with attached(prefill, decode) as (one, other):
        other.count_live(+1)
        assert one.has_room(background=True)
        assert not other.has_room(background=True)
        other.count_live(-1)
        assert other.has_room(background=True)
        assert prefill.holds == decode.holds == []


async def test_requests_end_after_their_worker_is_lost() -> None:
    worker = CpuWorker(Role.DECODE)
    async with attached(worker) as (link,):
        link.count_live(+1)
        worker.closes = True
        await until(lambda: has_attached_again(worker))
        worker.closes = False
        await until(lambda: all_usable([link]))
        link.count_live(-1)
        await until(lambda: has_room(link))


async def has_attached_again(worker: ScriptedWorker) -> bool:
    return worker.attached > 1


async def has_room(link: WorkerLink) -> bool:
    return link.has_room(background=True)


@pytest.mark.parametrize(("priority", "patient"), [(LAST_PRIORITY, True), (0, False)])
async def test_a_pause_is_no_stall(priority: int, *, patient: bool) -> None:
    async with attached(CpuWorker(Role.DECODE)) as (link,):
        membership = Membership("router", "tiny", Config())
        placer, config = Placer(membership, RouterConfig()), RouterConfig(first_token_timeout=9.0)
        admission = Admission(membership, placer, config, RouterMetrics())
        dispatcher = Dispatcher(membership, placer, admission, config, RouterMetrics())
        work = Work(AttemptKey("r", 1), [1], Sampling(), 8, frozenset(), priority=priority)
        running = RunningAttempt(
            dispatcher,
            work,
            Assignment(Placement("", link.worker_id), None, link),
            Suspicion.NONE,
            AnswerLedger(0.0),
        )
        assert running._more_time() == 0.0
        link.paused_at = time.monotonic() + 100.0
        assert (running._more_time() > 100.0) == patient

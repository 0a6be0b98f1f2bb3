"""A router's link to a worker, over a real stream to a scripted worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from scripted_worker import ScriptedWorker
from waiting import until

from baton.core.config import RouterConfig
from baton.core.errors import WorkerLost
from baton.core.types import AttemptKey, Role
from baton.router.placement.placement import Suspicion
from baton.router.requests.attempt import AttemptEvent, LinkLost
from baton.router.workers.link import WorkerLink
from baton.v1 import worker_pb2 as pb

KEY = AttemptKey("r", 1)
CONFIG = RouterConfig(ping_seconds=0.05, frozen_seconds=0.3, engine_stall_seconds=0.3)


@asynccontextmanager
async def linked(worker: ScriptedWorker) -> AsyncIterator[WorkerLink]:
    link = WorkerLink(await worker.start(), "router", "tiny", CONFIG, lambda link: None)
    task = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await worker.stop()


async def usable(link: WorkerLink) -> bool:
    return link.usable


async def unusable(link: WorkerLink) -> bool:
    return not link.usable


async def test_a_worker_is_usable_once_its_engine_has_reported() -> None:
    worker = ScriptedWorker()
    worker.reports = False
    async with linked(worker) as link:
        await until(lambda: welcomed(link))
        assert not link.usable
        worker.reports = True
        await until(lambda: usable(link))


async def welcomed(link: WorkerLink) -> bool:
    return link.welcome is not None


async def test_a_silent_worker_is_lost_and_its_requests_are_notified() -> None:
    worker = ScriptedWorker()
    async with linked(worker) as link:
        await until(lambda: usable(link))
        inbox: asyncio.Queue[AttemptEvent] = asyncio.Queue()
        link.open(KEY, inbox.put_nowait)
        worker.answers_pings = worker.reports = False
        async with asyncio.timeout(10):
            lost = await inbox.get()
        assert isinstance(lost, LinkLost)
        assert lost.worker_id == "decode-0"
        assert lost.loss is link.loss
        assert lost.loss is not None
        assert lost.loss.process == worker.incarnation
        assert "not answered" in lost.reason
        worker.answers_pings = worker.reports = True
        await until(lambda: usable(link))
        assert worker.attached >= 2


async def test_an_engine_that_hangs_with_work_is_lost_though_pings_are_answered() -> None:
    worker = ScriptedWorker()
    async with linked(worker) as link:
        await until(lambda: usable(link))
        inbox: asyncio.Queue[AttemptEvent] = asyncio.Queue()
        link.open(KEY, inbox.put_nowait)
        worker.reports = False
        async with asyncio.timeout(10):
            lost = await inbox.get()
        assert isinstance(lost, LinkLost)
        assert "engine" in lost.reason
        assert lost.loss is not None
        assert not lost.loss.is_open, "whatever ends such a process acquits nobody"
        await until(lambda: welcomed(link))
        # It welcomes routers as before, but nothing is sent there.
        assert not link.usable


async def test_a_worker_that_closes_its_stream_is_no_loss() -> None:
    worker = ScriptedWorker()
    async with linked(worker) as link:
        await until(lambda: usable(link))
        inbox: asyncio.Queue[AttemptEvent] = asyncio.Queue()
        link.open(KEY, inbox.put_nowait)
        worker.closes = True
        async with asyncio.timeout(10):
            lost = await inbox.get()
        assert isinstance(lost, LinkLost)
        assert lost.loss is None


async def test_an_idle_worker_that_reports_nothing_is_not_lost() -> None:
    worker = ScriptedWorker()
    async with linked(worker) as link:
        await until(lambda: usable(link))
        worker.reports = False
        await asyncio.sleep(1.0)
        assert worker.attached == 1


async def test_a_draining_worker_gets_nothing_new_and_keeps_its_requests() -> None:
    worker = ScriptedWorker()
    async with linked(worker) as link:
        await until(lambda: usable(link))
        inbox: asyncio.Queue[AttemptEvent] = asyncio.Queue()
        link.open(KEY, inbox.put_nowait)
        await worker.send(pb.WorkerMessage(draining=pb.Draining()))
        await until(lambda: unusable(link))
        tokens = pb.StepTokens(request_id="r", epoch=1, token_ids=[5])
        await worker.send(pb.WorkerMessage(step=pb.Step(tokens=[tokens])))
        event = await inbox.get()
        assert isinstance(event, pb.StepTokens)
        assert event.token_ids == [5]


async def test_a_router_ends_the_stream_once_it_has_read_the_last_message() -> None:
    worker = ScriptedWorker()
    async with linked(worker) as link:
        await until(lambda: usable(link))
        inbox: asyncio.Queue[AttemptEvent] = asyncio.Queue()
        link.open(KEY, inbox.put_nowait)
        failed = pb.Failed(request_id="r", epoch=1, message="it is being drained")
        await worker.send(pb.WorkerMessage(failed=failed))
        await worker.send(pb.WorkerMessage(closing=pb.Closing()))
        handed_back, lost = await inbox.get(), await inbox.get()
        assert isinstance(handed_back, pb.WorkerMessage)
        assert handed_back.failed.message == "it is being drained"
        assert isinstance(lost, LinkLost)
        assert lost.reason == "the worker closed the stream"
        await until(lambda: attached_again(worker))


async def attached_again(worker: ScriptedWorker) -> bool:
    return worker.attached == 2


async def test_a_worker_that_drains_already_says_so_in_its_welcome() -> None:
    worker = ScriptedWorker()
    worker.draining = True
    async with linked(worker) as link:
        await until(lambda: welcomed(link))
        assert link.draining


async def test_a_message_of_another_epoch_is_dropped() -> None:
    worker = ScriptedWorker()
    async with linked(worker) as link:
        await until(lambda: usable(link))
        inbox: asyncio.Queue[AttemptEvent] = asyncio.Queue()
        link.open(KEY, inbox.put_nowait)
        for epoch in (0, 2, 1):
            first = pb.FirstToken(request_id="r", epoch=epoch, token=epoch)
            await worker.send(pb.WorkerMessage(first_token=first))
        event = await inbox.get()
        assert isinstance(event, pb.WorkerMessage)
        assert event.first_token.token == 1
        assert inbox.empty()


async def test_lost_cache_events_are_requested_again_as_a_whole() -> None:
    worker = ScriptedWorker()
    keys = [bytes([number]) * 16 for number in range(4)]

    async def resyncs(count: int) -> bool:
        return sum(message.HasField("resync_cache") for message in worker.received) == count

    async def tell(events: pb.CacheEvents) -> None:
        await worker.send(pb.WorkerMessage(cache_events=events))

    async with linked(worker) as link:
        await until(lambda: usable(link))
        await tell(pb.CacheEvents(number=4, reset=True, stored=keys[:1]))
        await tell(pb.CacheEvents(number=5, stored=keys[1:2]))
        await tell(pb.CacheEvents(number=7, stored=keys[3:]))
        await until(lambda: resyncs(1))
        assert (len(link.cache), link.cache.leading(keys)) == (3, 4)  # one is missing
        await tell(pb.CacheEvents(number=7, reset=True, stored=keys))
        await tell(pb.CacheEvents(number=8, evicted=keys[3:]))
        await until(lambda: holds(link, 3))
        assert await resyncs(1)
        worker.answers_pings = worker.reports = False
        await until(lambda: holds(link, 0))


async def holds(link: WorkerLink, count: int) -> bool:
    return len(link.cache) == count


async def test_a_suspect_that_runs_alone_shares_no_worker_with_a_suspect() -> None:
    link = WorkerLink("nowhere", "router", "tiny", CONFIG, lambda link: None)
    rooms = {}
    for suspect in Suspicion:
        link.assigned.count_suspect(suspect, +1)
        rooms[suspect] = [link.has_room(suspicion) for suspicion in Suspicion]
        link.assigned.count_suspect(suspect, -1)
    assert rooms == {
        Suspicion.NONE: [True, True, True],
        Suspicion.SUSPECT: [True, True, False],
        Suspicion.ALONE: [True, False, False],
    }


async def test_a_worker_that_switches_its_role_is_usable_in_the_new_one() -> None:
    worker = ScriptedWorker(Role.DECODE)
    async with linked(worker) as link:
        await until(lambda: usable(link))
        asking = asyncio.create_task(link.switch(Role.PREFILL))
        await until(lambda: was_told_to_switch(worker))
        assert not link.usable
        await worker.become(Role.PREFILL)
        assert (await asking).error == ""
        assert (link.role, link.usable, worker.attached) == (Role.PREFILL, True, 1)


async def was_told_to_switch(worker: ScriptedWorker) -> bool:
    return any(message.HasField("switch_role") for message in worker.received)


async def test_a_pending_role_switch_fails_when_the_worker_is_lost() -> None:
    worker = ScriptedWorker(Role.DECODE)
    async with linked(worker) as link:
        await until(lambda: usable(link))
        asking = asyncio.create_task(link.switch(Role.PREFILL))
        await until(lambda: was_told_to_switch(worker))
        await worker.stop()
        with pytest.raises(WorkerLost):
            await asking


async def test_a_worker_that_does_not_listen_is_reported_as_unreachable(closed_port: int) -> None:
    link = WorkerLink(f"127.0.0.1:{closed_port}", "router", "tiny", CONFIG, lambda link: None)
    task = asyncio.create_task(link.run())

    async def at_fault() -> bool:
        return bool(link.fault)

    await until(at_fault)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert link.fault == "it cannot be reached: Connection refused"

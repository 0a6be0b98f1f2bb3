"""Membership and placements of a router, with real streams to scripted workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from scripted_worker import ScriptedWorker
from waiting import until

from baton.core.config import Config, RouterConfig
from baton.core.errors import LayoutMismatch
from baton.core.page_keys import page_keys
from baton.core.types import AttemptKey, Role, Sampling, Work
from baton.router.placement.placement import Placement, Policy, Reason, Suspicion
from baton.router.placement.placer import Placer
from baton.router.requests.verdicts import Finding, Loss
from baton.router.workers.membership import Membership
from baton.v1 import worker_pb2 as pb

PROMPT = list(range(64))
KEYS = page_keys(b"root", PROMPT, 16)
WORK = Work(AttemptKey("r", 1), PROMPT, Sampling(), 100, frozenset(), page_keys=KEYS)


@asynccontextmanager
async def cluster(
    router: RouterConfig,
) -> AsyncIterator[tuple[Membership, Placer, dict[str, ScriptedWorker]]]:
    """Two prefill and two decode workers, all connected."""
    workers = {
        f"{role.value}-{index}": ScriptedWorker(role, f"{role.value}-{index}")
        for role in Role
        for index in range(2)
    }
    membership = Membership("router", "tiny", Config(router=router))
    placer = Placer(membership, router)
    membership.set_addresses([await worker.start() for worker in workers.values()])
    try:
        await until(lambda: attached(membership))
        for name in ("prefill-0", "prefill-1"):
            for peer in ("decode-0", "decode-1"):
                connected = pb.Connected(worker_id=peer, agent=f"agent of {peer}")
                await workers[name].send(pb.WorkerMessage(connected=connected))
        await until(lambda: connected_to_all(membership))
        yield membership, placer, workers
    finally:
        await membership.stop()
        for worker in workers.values():
            await worker.stop()


async def attached(membership: Membership) -> bool:
    return sum(link.usable for link in membership.links) == 4


async def connected_to_all(membership: Membership) -> bool:
    agents = [link.agent for link in membership.links]
    return sum(link.peers.reaches(each) for link in membership.links for each in agents) == 4


async def store(membership: Membership, worker: ScriptedWorker, keys: list[bytes]) -> None:
    events = pb.CacheEvents(number=1, reset=True, stored=keys)
    await worker.send(pb.WorkerMessage(cache_events=events))

    async def stored() -> bool:
        link = membership.find(worker.name)
        return link is not None and len(link.cache) == len(keys)

    await until(stored)


def placed(placer: Placer, work: Work = WORK) -> Placement:
    found = placer.choose(work)
    assert isinstance(found, Placement)
    return found


def in_turn(placer: Placer) -> list[Placement]:
    """Of several requests like WORK, one after the other."""
    chosen = []
    for placer.placed in range(4):
        chosen.append(placed(placer))
    return chosen


async def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    async with cluster(RouterConfig(local_prefill="fallback")) as (membership, placer, workers):
        await store(membership, workers["prefill-1"], KEYS)
        for found in in_turn(placer):
            assert (found.prefill, found.code) == ("prefill-1", Reason.CACHED)
            # The last token is always computed.
            assert found.forecast is not None
            assert found.forecast.cached_tokens == 48


async def test_prompts_with_a_shared_prefix_follow_one_that_is_being_prefilled() -> None:
    async with cluster(RouterConfig(local_prefill="fallback")) as (membership, placer, _):
        link = membership.find("prefill-1")
        assert link is not None
        link.cache.add_pending(KEYS)
        assert {found.prefill for found in in_turn(placer)} == {"prefill-1"}
        link.cache.remove_pending(KEYS)
        assert {found.prefill for found in in_turn(placer)} == {"prefill-0", "prefill-1"}


async def test_a_queue_that_is_longer_than_the_saving_moves_a_session_away() -> None:
    async with cluster(RouterConfig(local_prefill="fallback")) as (membership, placer, workers):
        await store(membership, workers["prefill-1"], KEYS)
        link = membership.find("prefill-1")
        assert link is not None
        prompt = link.prompts.add(500, 0)
        found = placed(placer)
        assert (found.prefill, found.code) == ("prefill-0", Reason.CACHE_BUSY)
        link.prompts.remove(prompt)
        assert placed(placer).prefill == "prefill-1"


async def test_a_lost_worker_has_nothing_cached() -> None:
    async with cluster(RouterConfig(local_prefill="fallback")) as (membership, placer, workers):
        await store(membership, workers["prefill-1"], KEYS)
        await workers["prefill-1"].stop()

        async def alone() -> bool:
            return membership.find("prefill-1") is None

        await until(alone)
        found = placed(placer)
        assert (found.prefill, found.code) == ("prefill-0", Reason.LEAST_TIME)


async def test_a_request_that_lost_a_worker_goes_only_to_workers_that_answered_since() -> None:
    """A host takes all its workers along, and one is seen to go before the other."""
    router = RouterConfig(local_prefill="fallback", ping_seconds=0.05)
    async with cluster(router) as (membership, placer, workers):

        async def suspect_is_placed() -> bool:
            return isinstance(placer.choose(WORK, Suspicion.SUSPECT), Placement)

        async def one_is_lost() -> bool:
            return membership.find("decode-0") is None

        workers["decode-1"].answers_pings = False
        await workers["decode-0"].stop()
        await until(one_is_lost)
        assert placed(placer).decode == "decode-1"
        assert not await suspect_is_placed()
        workers["decode-1"].answers_pings = True
        await until(suspect_is_placed)


async def test_the_configuration_selects_the_policy() -> None:
    always = RouterConfig(policy="round_robin", local_prefill="always")
    async with cluster(always) as (membership, placer, workers):
        await store(membership, workers["decode-1"], KEYS)
        chosen = in_turn(placer)
        assert {(found.policy, found.prefill) for found in chosen} == {(Policy.LOCAL, "")}
        assert {found.decode for found in chosen} == {"decode-0", "decode-1"}


async def test_only_pairs_that_fit_are_used_and_misfits_have_a_reason() -> None:
    async with cluster(RouterConfig(local_prefill="fallback")) as (membership, placer, workers):
        why = "page_size is 16 here and 32 there"
        for name in ("prefill-0", "prefill-1"):
            mismatch = pb.Connected(
                worker_id="decode-1",
                agent="agent of decode-1",
                error=why,
                reason=LayoutMismatch.reason,
            )
            await workers[name].send(pb.WorkerMessage(connected=mismatch))
        links = {link.worker_id: link for link in membership.links}

        async def heard() -> bool:
            return len(membership.pairs.misfits(links["decode-1"])) == 2

        await until(heard)
        assert {found.decode for found in in_turn(placer)} == {"decode-0"}
        assert membership.pairs.misfits(links["prefill-0"]) == [("decode-1", why)]
        assert not membership.pairs.misfits(links["decode-0"])
        # They are of use all the same.
        assert not any(membership.fault(link) for link in links.values())
        await workers["decode-0"].stop()

        async def alone() -> bool:
            return membership.find("decode-0") is None

        await until(alone)
        assert membership.fault(links["prefill-0"]) == why
        assert isinstance(placer.choose(WORK), LayoutMismatch)


@pytest.fixture
async def membership() -> AsyncIterator[Membership]:
    pings = RouterConfig(ping_seconds=0.05, frozen_seconds=0.3)
    membership = Membership("router", "tiny", Config(router=pings))
    yield membership
    await membership.stop()


def announced(worker: ScriptedWorker) -> list[str]:
    gone = [message for message in worker.received if message.HasField("sender_gone")]
    return [message.sender_gone.agent for message in gone]


async def test_an_ended_agent_is_announced_once_to_every_worker(
    membership: Membership,
) -> None:
    early, late = ScriptedWorker(name="early"), ScriptedWorker(name="late")
    prefill = ScriptedWorker(Role.PREFILL)
    addresses = [await worker.start() for worker in (early, prefill)]

    async def is_told(worker: ScriptedWorker) -> bool:
        return bool(announced(worker))

    membership.set_addresses(addresses)
    await membership.wait_until(lambda: sum(link.usable for link in membership.links) == 2)
    membership.note_ended(["an agent"])
    membership.note_ended(["an agent"])
    await until(lambda: is_told(early))
    membership.set_addresses([*addresses, await late.start()])
    await until(lambda: is_told(late))
    await until(lambda: is_told(prefill))
    assert [announced(worker) for worker in (early, late, prefill)] == 3 * [["an agent"]]
    for worker in (early, late, prefill):
        await worker.stop()


async def test_ended_agents_are_announced_again_on_a_new_stream(
    membership: Membership,
) -> None:
    worker = ScriptedWorker()
    membership.note_ended(["an agent"])
    membership.set_addresses([await worker.start()])

    async def is_told(times: int) -> bool:
        return len(announced(worker)) == times

    await until(lambda: is_told(1))
    worker.answers_pings = worker.reports = False
    await until(lambda: is_told(2))
    await worker.stop()


def loss_of(membership: Membership, name: str) -> Loss | None:
    return next(link.loss for link in membership.links if link.worker_id == name)


async def test_a_worker_that_answers_again_accuses_nobody() -> None:
    quick = RouterConfig(ping_seconds=0.05, frozen_seconds=0.3)
    async with cluster(quick) as (membership, _, workers):
        workers["decode-0"].answers_pings = workers["decode-0"].reports = False

        async def lost() -> bool:
            return loss_of(membership, "decode-0") is not None

        await until(lost)
        loss = loss_of(membership, "decode-0")
        assert loss is not None
        assert loss.finding("r") is Finding.SUSPECT
        workers["decode-0"].answers_pings = workers["decode-0"].reports = True
        await until(lambda: attached(membership))
        assert loss.finding("r") is Finding.INNOCENT


@pytest.mark.parametrize("way", ["welcome", "controller"])
async def test_requests_learn_how_a_lost_process_ended(way: str) -> None:
    quick = RouterConfig(ping_seconds=0.05, frozen_seconds=0.3)
    async with cluster(quick) as (membership, _, workers):
        worker = workers["decode-0"]
        worker.answers_pings = worker.reports = False

        async def judged() -> bool:
            return loss is not None and loss.verdict is not None

        async def lost() -> bool:
            return loss_of(membership, "decode-0") is not None

        await until(lost)
        loss = loss_of(membership, "decode-0")
        verdict = pb.Verdict(incarnation=worker.incarnation, crashed=True, suspects=["r"])
        worker.incarnation += 1
        if way == "welcome":
            worker.verdicts = [verdict]
        else:
            membership.note_verdicts([verdict])
        await until(judged)
        assert loss is not None
        assert loss.finding("r") is Finding.CULPRIT
        assert loss.finding("other") is Finding.INNOCENT

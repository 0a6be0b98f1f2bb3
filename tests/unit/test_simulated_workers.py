"""Simulated workers: their prefix caches, and how the policy sees them."""

from __future__ import annotations

import random

import pytest

from baton.core.errors import BatonError
from baton.planner.profile import H200_8B
from baton.planner.simulated_workers import BlockCaches
from baton.planner.simulator import Setup, Simulator
from baton.planner.sizing import Goals, Pools
from baton.planner.trace import TraceRequest
from baton.router.placement.placement import MANY_WORKERS
from baton.router.placement.policy import choose

GOALS = Goals(ttft=4.0, itl=0.05, most_workers=60)


@pytest.mark.parametrize("count", [3, MANY_WORKERS])
def test_the_policy_sees_no_room_but_on_active_workers(count: int) -> None:
    simulator = Simulator(Setup(Pools(count, count), H200_8B, GOALS))
    simulator._prefill.retire(1)
    simulator._decode.retire(0)
    simulator._decode.leased[2] = 7
    simulator._decode.running[:2] = 5
    snapshot = simulator.snapshot(TraceRequest(0.0, 1000, 10, (0, 1)))
    assert list(snapshot.prefill.has_room[:3]) == [1, 0, 1]
    assert list(snapshot.decode.has_room[:3]) == [0, 1, 1]
    assert list(snapshot.decode.running[:3]) == [0, 5, 0]
    assert list(snapshot.decode.leased_pages[:3]) == [0, 0, 7]
    assert snapshot.prefill.reaches == [frozenset(snapshot.decode.worker_ids)] * count
    assert len(snapshot.decode.prefilling) == count


def test_a_pool_without_active_workers_has_requests_wait() -> None:
    simulator = Simulator(Setup(Pools(1, 1), H200_8B, GOALS))
    simulator._decode.retire(0)
    assert isinstance(choose(simulator.snapshot(TraceRequest(0.0, 100, 10, (0,)))), BatonError)


def test_every_worker_is_known_to_hold_what_it_holds_of_a_prompt() -> None:
    source = random.Random(3)
    caches, prompts = BlockCaches(10**6), [list(range(source.randint(0, 9))) for _ in range(5)]
    for index, blocks in enumerate(prompts):
        caches.add_worker(index)
        caches.hold(index, blocks)
    asked = [0, 1, 2, 3, 4, 99]
    found = caches.leading(asked, len(prompts)).tolist()
    assert found == [min(len(blocks), 5) for blocks in prompts]


def test_a_full_cache_lets_go_of_the_end_of_the_oldest_prompt_first() -> None:
    caches = BlockCaches(4)
    caches.add_worker(0)
    caches.hold(0, [1, 2, 3])
    caches.hold(0, [7, 8])
    assert caches.leading([1, 2, 3], 1).tolist() == [2]
    assert caches.leading([7, 8], 1).tolist() == [2]


def test_a_worker_that_is_gone_holds_nothing() -> None:
    caches = BlockCaches(4)
    caches.add_worker(0)
    caches.hold(0, [1])
    caches.remove_worker(0)
    assert caches.leading([1], 1).tolist() == [0]

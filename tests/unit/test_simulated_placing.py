"""The quick ranking of simulated workers against the router's own policy."""

from __future__ import annotations

import dataclasses
import random

import numpy
import pytest

from baton.planner.placing import Ask, choose_exactly, choose_quickly
from baton.planner.profile import H200_8B
from baton.planner.simulated_workers import BlockCaches, DecodePool, PrefillPool
from baton.router.placement.cost_model import Costs

SHARED = dataclasses.replace(H200_8B, step=(4e-3, 1e-5, 4e-7, 1e-3)).costs(128.0)


def pools(source: random.Random, prefill: int, decode: int) -> tuple[PrefillPool, DecodePool]:
    first, second = PrefillPool(8), DecodePool(8)
    for _ in range(prefill):
        first.add(0.0)
    for _ in range(decode):
        second.add(0.0)
    # Few values, so that workers are often equal.
    first.pending[:] = [source.choice((0, 0, 512, 9000)) for _ in range(prefill)]
    for column, values in (
        (second.requests, (0, 3, 3, 40)),
        (second.waiting, (0, 0, 0, 2, 16)),
        (second.leased, (0, 800, 49_990)),
    ):
        column[:] = [source.choice(values) for _ in range(decode)]
    second.running[:] = numpy.maximum(second.requests - second.waiting, 0)
    return first, second


def ask(source: random.Random, prefill: int, decode: int, costs: Costs) -> Ask:
    prompt = source.choice((1, 16, 700, 8000, 60_000))
    cached = [each for each in (0, 0, 512, 7680, 51_200) if each < prompt]
    return Ask(
        prompt_tokens=prompt,
        tokens_wanted=source.choice((1, 20, 500)),
        prefill_cached=numpy.array([source.choice(cached) for _ in range(prefill)]),
        decode_cached=numpy.array([source.choice(cached) for _ in range(decode)]),
        turn=source.randrange(100),
        costs=costs,
        page_size=16,
        page_bytes=2**21,
        pool_pages=50_000,
        backlog=16,
    )


@pytest.mark.parametrize("costs", [H200_8B.costs(300.0), SHARED], ids=["apart", "shared"])
def test_the_quick_choice_is_the_policys_own(costs: Costs) -> None:
    source = random.Random(7)
    for _ in range(300):
        sizes = source.randint(1, 6), source.randint(1, 8)
        made, asked = pools(source, *sizes), ask(source, *sizes, costs)
        assert choose_quickly(asked, *made) == choose_exactly(asked, *made)


def test_a_pool_without_active_workers_has_requests_wait() -> None:
    source = random.Random(0)
    (prefill, decode), asked = pools(source, 1, 1), ask(source, 1, 1, SHARED)
    decode.retire(0)
    assert choose_quickly(asked, prefill, decode) is None


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

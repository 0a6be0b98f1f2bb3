"""The scorer against plain sums over all pairs, with lists and with arrays."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import numpy
import pytest
from snapshots import COSTS, DecodeView, PrefillView, cluster

from baton.core.errors import BatonError
from baton.router.placement.cost_model import Costs
from baton.router.placement.placement import (
    Column,
    FetchPages,
    LocalPrefill,
    Placement,
    Snapshot,
    Strategy,
)
from baton.router.placement.policy import choose
from baton.router.placement.scorer import ADAPTER_SECONDS, earliest_first_token

# Workers on devices of their own, and on shared hardware.
APART = dataclasses.replace(Costs(), interfered=0.0)
SHARED = dataclasses.replace(Costs(), interfered=0.4)

Rows = tuple[list[PrefillView], list[DecodeView], dict[str, object]]


def rows(draw: random.Random, prefill: int, decode: int) -> Rows:
    """Few values, so that workers are often equal."""
    prompt = draw.choice((1, 16, 700, 8000, 60_000))
    cached = [each for each in (0, 0, 512, 7680, 51_200) if each < prompt]
    names = [f"d{index}" for index in range(decode)]

    def held() -> tuple[int, int]:
        tokens = draw.choice(cached)
        return tokens, draw.choice((0, 0, tokens))

    first = [
        PrefillView(
            f"p{index}",
            draw.choice((0, 0, 512, 9000)),
            frozenset(name for name in names if draw.random() < 0.7),
            draw.random() < 0.9,
            *held(),
            draw.random() < 0.5,
        )
        for index in range(prefill)
    ]
    second = []
    for name in names:
        requests, waiting, prefilling = draw.choice((0, 3, 3, 40)), draw.choice((0, 0, 2)), 0
        pending = draw.choice((0, 0, 0, 800))
        prefilling = draw.choice((0, 1)) if pending else 0
        running = max(0, requests - waiting - prefilling)
        tokens, saved = held()
        second.append(
            DecodeView(
                name,
                requests,
                draw.choice((10, 1000)),
                draw.random() < 0.9,
                tokens,
                running,
                waiting,
                draw.choice((0, 800)),
                pending,
                saved,
                prefilling,
                draw.random() < 0.5,
            )
        )
    more = {
        "prompt_tokens": prompt,
        "tokens_wanted": draw.choice((20, 500)),
        "turn": draw.randrange(100),
        "page_bytes": draw.choice((0, 2**21)),
        "local": draw.choice(list(LocalPrefill)),
        "fetch": draw.choice(list(FetchPages)),
        "strategy": draw.choice([*Strategy, Strategy.KV_AWARE, Strategy.KV_AWARE]),
    }
    return first, second, more


def random_rows(count: int) -> Sequence[Rows]:
    draw = random.Random(7)
    return [rows(draw, draw.randint(1, 6), draw.randint(1, 8)) for _ in range(count)]


@pytest.mark.parametrize("costs", [COSTS, APART, SHARED], ids=["known", "apart", "shared"])
def test_arrays_and_lists_lead_to_the_same_choice(costs: Costs) -> None:
    for first, second, more in random_rows(300):
        made = [cluster(first, second, kind, costs=costs, **more) for kind in (list, numpy.array)]
        assert earliest_first_token(made[0]) == earliest_first_token(made[1])
        for one_token in (False, True):
            found = [choose(snapshot, one_token=one_token) for snapshot in made]
            assert repr(found[0]) == repr(found[1])


def pair_cost(snapshot: Snapshot, prefill: PrefillView, decode: DecodeView) -> float:
    """By the definition: whose wait, compute, transfer, steps and interference a pair costs."""
    costs, size = snapshot.costs, snapshot.page_size
    cached, own = prefill.cached_tokens, -(-snapshot.prompt_tokens // size)
    compute = costs.prefill.seconds(snapshot.prompt_tokens - cached, cached)
    wait = costs.prefill.wait(prefill.pending_tokens, prefill.saved_tokens)
    wait = max(wait, ADAPTER_SECONDS * prefill.lacks_adapter)
    workers = snapshot.decode
    columns = zip(workers.running, workers.pending_tokens, workers.prefilling, strict=True)
    beside = [
        (0, running + max(prefilling, 1)) if pending else (running, 0)
        for running, pending, prefilling in columns
    ]
    share = costs.interference(sum(each[0] for each in beside), sum(each[1] for each in beside))
    pages = -(-(snapshot.prompt_tokens - decode.cached_tokens) // size)
    transfer = costs.transfer_seconds(pages * snapshot.page_bytes)
    late = costs.exposed_seconds(transfer, compute)
    late += max(0.0, costs.local.wait(0, decode.saved_tokens) - compute)
    late = max(late, costs.local.wait(decode.pending_tokens) - compute)
    short = own > decode.free_pages + decode.cached_tokens // size
    room = costs.room_seconds(decode.waiting + short, decode.requests, decode.leased_pages)
    steps = costs.decode_seconds(snapshot.tokens_wanted, decode.requests, decode.leased_pages, own)
    load = max(0.0, ADAPTER_SECONDS * decode.lacks_adapter - compute)
    return wait + compute * (1 + share) + late + load + room + steps


@pytest.mark.parametrize("kind", [list, numpy.array], ids=["lists", "arrays"])
@pytest.mark.parametrize("costs", [COSTS, APART, SHARED], ids=["known", "apart", "shared"])
def test_no_pair_costs_less_than_the_chosen_one(
    costs: Costs, kind: Callable[[Sequence[int]], Column]
) -> None:
    for first, second, more in random_rows(200):
        more |= {
            "local": LocalPrefill.NEVER,
            "fetch": FetchPages.NEVER,
            "strategy": Strategy.KV_AWARE,
        }
        snapshot = cluster(first, second, kind, costs=costs, **more)
        pairs = {
            (one.worker_id, other.worker_id): pair_cost(snapshot, one, other)
            for one in first
            for other in second
            if one.has_room and other.has_room and other.worker_id in one.reaches
        }
        found = choose(snapshot)
        if isinstance(found, Placement):
            least = min(pairs.values())
            assert pairs[found.prefill, found.decode] == pytest.approx(least, rel=1e-9)
        else:
            assert isinstance(found, BatonError)
            assert not pairs

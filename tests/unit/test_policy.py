from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import numpy
import pytest
from snapshots import PrefillView, asked, cluster, decode, placed, prefill, where

from baton.core.errors import BatonError, Exhausted, LayoutMismatch, Unavailable
from baton.router.placement.placement import (
    Column,
    LocalPrefill,
    Placement,
    Reason,
    Snapshot,
    Strategy,
)
from baton.router.placement.policy import choose

MISSING = "no prefill worker is ready"

LOADS = [
    (cluster([prefill("p0")], [decode("d0")]), ("p0", "d0")),
    (cluster([prefill("p0", 9), prefill("p1", 3)], [decode("d0")]), ("p1", "d0")),
    (cluster([prefill("p0")], [decode("d0", 4), decode("d1", 2)]), ("p0", "d1")),
    (cluster([prefill("p0")], [decode("d0", 1, 0), decode("d1", 1, 8)]), ("p0", "d1")),
    (
        cluster([prefill("p0", 0, frozenset({"d1"}))], [decode("d0"), decode("d1", 7)]),
        ("p0", "d1"),
    ),
    (cluster([prefill("p0", 0, frozenset()), prefill("p1", 5)], [decode("d0")]), ("p1", "d0")),
    (cluster([prefill("p0")], [decode("d0", room=False), decode("d1", 9)]), ("p0", "d1")),
]


@pytest.mark.parametrize("strategy", [Strategy.KV_AWARE, Strategy.LEAST_LOADED])
@pytest.mark.parametrize(("snapshot", "expected"), LOADS)
def test_where_nothing_is_cached_or_measured_the_least_loaded_pair_is_chosen(
    snapshot: Snapshot, expected: tuple[str, str], strategy: Strategy
) -> None:
    assert where(dataclasses.replace(snapshot, strategy=strategy)) == expected


@pytest.mark.parametrize("strategy", list(Strategy))
def test_equal_workers_take_turns(strategy: Strategy) -> None:
    names = frozenset({"d0", "d1", "d2"})
    snapshot = cluster(
        [prefill(f"p{i}", reaches=names) for i in range(3)],
        [decode(f"d{i}") for i in range(3)],
        strategy=strategy,
    )
    chosen = [where(dataclasses.replace(snapshot, turn=turn)) for turn in range(9)]
    assert set(Counter(name for pair in chosen for name in pair).values()) == {3}


@pytest.mark.parametrize(
    ("snapshot", "expected", "code"),
    [
        # Reading 900 tokens again takes longer than waiting for 300 others.
        (
            cluster([prefill("p0"), prefill("p1", 300, cached=896)], [decode("d0")]),
            ("p1", "d0"),
            Reason.CACHED,
        ),
        # Until the queue is longer than what the cache saves.
        (
            cluster([prefill("p0"), prefill("p1", 900, cached=896)], [decode("d0")]),
            ("p0", "d0"),
            Reason.CACHE_BUSY,
        ),
        (
            cluster([prefill("p0", cached=160), prefill("p1", cached=896)], [decode("d0")]),
            ("p1", "d0"),
            Reason.CACHED,
        ),
        # Pages that decode has need not travel, though the worker is a little busier.
        (
            cluster([prefill("p0", cached=992)], [decode("d0"), decode("d1", cached=992)]),
            ("p0", "d1"),
            Reason.CACHED,
        ),
        # But its other requests count for more than a transfer.
        (
            cluster([prefill("p0", cached=992)], [decode("d0"), decode("d1", 9, cached=992)]),
            ("p0", "d0"),
            Reason.CACHED,
        ),
        # A worker where others wait for room is not waited for.
        (
            cluster([prefill("p0")], [decode("d0", 4), decode("d1", 4, waiting=3)]),
            ("p0", "d0"),
            Reason.LEAST_TIME,
        ),
        # A pool without room for the prompt is avoided.
        (
            cluster([prefill("p0")], [decode("d0", 4, free=10), decode("d1", 5)]),
            ("p0", "d1"),
            Reason.LEAST_TIME,
        ),
    ],
)
def test_the_pair_with_the_least_predicted_time_is_chosen(
    snapshot: Snapshot, expected: tuple[str, str], code: Reason
) -> None:
    found = placed(asked(snapshot, 1000))
    assert ((found.prefill, found.decode), found.code) == (expected, code)


def kept(view: PrefillView, tokens: int) -> PrefillView:
    return view._replace(cached_tokens=tokens, saved_tokens=tokens)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        # Bringing 896 tokens back takes a tenth of reading them.
        ([prefill("p0"), kept(prefill("p1"), 896)], "p1"),
        ([prefill("p0", cached=896), kept(prefill("p1"), 896)], "p0"),
        ([prefill("p0"), kept(prefill("p1", 850), 896)], "p0"),
        ([prefill("p0", cached=800), kept(prefill("p1"), 896)], "p1"),
        ([prefill("p0", cached=830), kept(prefill("p1"), 896)], "p0"),
    ],
)
def test_what_a_worker_keeps_counts_with_what_it_costs_to_bring_back(
    workers: list[PrefillView], expected: str
) -> None:
    assert where(asked(cluster(workers, [decode("d0")]), 1000)) == (expected, "d0")


def test_a_decode_worker_brings_pages_back_while_the_prompt_is_computed() -> None:
    keeps = decode("d0")._replace(cached_tokens=896, saved_tokens=896)
    lacks, has = decode("d1"), decode("d1", cached=896)
    slow = cluster([prefill("p0")], [keeps, lacks])
    assert where(asked(slow, 1000)) == ("p0", "d0"), "hidden, and nothing to transfer"
    quick = cluster([prefill("p0", cached=992)], [keeps, has])
    assert where(asked(quick, 1000, local=LocalPrefill.NEVER)) == ("p0", "d1")


@pytest.mark.parametrize("column", [list, numpy.array])
@pytest.mark.parametrize(
    ("pending", "tokens", "expected"),
    [
        # Longer than 300 others take to be computed, and than a step beside another request.
        (300, 100, ("p1", "d1")),
        # Hidden behind its own prompt from the decode worker, and shorter than the queue.
        (500, 1000, ("p0", "d0")),
    ],
)
def test_a_worker_that_has_the_adapter_is_preferred_for_what_a_load_takes(
    pending: int, tokens: int, expected: tuple[str, str], column: Callable[..., Column]
) -> None:
    snapshot = cluster(
        [prefill("p0")._replace(lacks_adapter=True), prefill("p1", pending)],
        [decode("d0")._replace(lacks_adapter=True), decode("d1", 1)],
        column,
    )
    assert where(asked(snapshot, tokens)) == expected
    idle = [decode("d0")._replace(lacks_adapter=True), decode("d1")]
    alone = cluster([], idle, column, local=LocalPrefill.ALWAYS)
    assert where(asked(alone, tokens)) == ("", "d1")


@pytest.mark.parametrize("strategy", [Strategy.LEAST_LOADED, Strategy.ROUND_ROBIN])
def test_the_other_strategies_know_nothing_of_caches(strategy: Strategy) -> None:
    snapshot = cluster(
        [prefill("p0"), prefill("p1", cached=992)], [decode("d0"), decode("d1", cached=992)]
    )
    found = placed(asked(snapshot, 1000, strategy=strategy, local=LocalPrefill.AUTO))
    assert (found.prefill, found.decode, found.code) == ("p0", "d0", Reason(strategy.value))


def test_the_best_pair_is_found_whoever_reaches_whom() -> None:
    views = [prefill(f"p{i}", 7 * i % 5, frozenset({f"d{i}"})) for i in range(8)]
    others = [decode(f"d{i}", 3 * i % 4) for i in range(8)]
    found = placed(asked(cluster(views, others), 100))
    # p5 and p0 have nothing pending; of their only decode workers d0 has fewer requests.
    assert (found.prefill, found.decode) == ("p0", "d0")


def test_a_placement_says_what_was_predicted() -> None:
    snapshot = cluster([prefill("p0", 300, cached=896)], [decode("d0")])
    forecast = placed(asked(snapshot, 1000)).forecast
    assert forecast is not None
    assert forecast.first_token_seconds == pytest.approx(0.404)
    assert (forecast.pending_tokens, forecast.cached_tokens) == (300, 896)


@pytest.mark.parametrize(
    ("snapshot", "error", "words"),
    [
        (cluster(), Unavailable, "no prefill worker"),
        (cluster(decode=[decode("d0")]), Unavailable, "no prefill worker"),
        (cluster(prefill=[prefill("p0")]), Unavailable, "no decode worker"),
        (cluster(prefill=[prefill("p0")], local_prefill=True), Unavailable, "no decode worker"),
        (cluster([prefill("p0", 0, frozenset())], [decode("d0")]), Unavailable, "connected"),
        (
            cluster(
                [prefill("p0", 0, frozenset())], [decode("d0")], mismatches=["page_size 16 and 32"]
            ),
            LayoutMismatch,
            "page_size 16 and 32",
        ),
        (cluster([prefill("p0")], [decode("d0", room=False)]), Exhausted, "decode worker is full"),
        (
            cluster([prefill("p0", room=False)], [decode("d0")]),
            Exhausted,
            "prefill worker is full",
        ),
        (
            cluster([], [decode("d0", room=False)], local_prefill=True),
            Exhausted,
            "decode worker is full",
        ),
    ],
)
def test_no_placement_says_why(snapshot: Snapshot, error: type[BatonError], words: str) -> None:
    found = choose(snapshot)
    assert type(found) is error
    assert words in str(found)


@pytest.mark.parametrize(
    ("snapshot", "name", "reason"),
    [
        (cluster([], [decode("d0", 3), decode("d1", 2)], local_prefill=True), "d1", MISSING),
        (cluster([], [decode("d0"), decode("d1", 2)], local_prefill=True), "d0", MISSING),
        (
            cluster([prefill("p0", 0, frozenset())], [decode("d0")], local_prefill=True),
            "d0",
            "no prefill worker is connected to a decode worker yet",
        ),
    ],
)
def test_decode_workers_read_prompts_when_no_prefill_worker_can(
    snapshot: Snapshot, name: str, reason: str
) -> None:
    assert choose(snapshot) == Placement("", name, reason, Reason.NO_PREFILL)


def test_pools_that_do_not_fit_are_not_hidden_by_local_prefill() -> None:
    snapshot = cluster(
        [prefill("p0", 0, frozenset())], [decode("d0")], mismatches=["differ"], local_prefill=True
    )
    assert isinstance(choose(snapshot), LayoutMismatch)


def test_prefill_that_is_merely_busy_is_waited_for() -> None:
    snapshot = cluster([prefill("p0", 9000)], [decode("d0")], local_prefill=True)
    assert where(snapshot) == ("p0", "d0")


@pytest.mark.parametrize(
    ("snapshot", "prefill_worker", "decode_worker"),
    [
        (cluster([prefill("p0", 5), prefill("p1", 4)]), "p1", ""),
        (cluster([prefill("p0", 5), prefill("p1", 4, room=False)], [decode("d0")]), "p0", ""),
        (cluster([], [decode("d0")], local_prefill=True), "", "d0"),
    ],
)
def test_one_token_needs_no_decode_worker(
    snapshot: Snapshot, prefill_worker: str, decode_worker: str
) -> None:
    found = choose(snapshot, one_token=True)
    assert isinstance(found, Placement)
    assert (found.prefill, found.decode) == (prefill_worker, decode_worker)

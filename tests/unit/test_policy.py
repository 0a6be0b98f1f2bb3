from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from core.errors import BatonError, Exhausted, LayoutMismatch, Unavailable
from router.cost_model import CostModel, Costs
from router.placement import (
    DecodeView,
    Fetch,
    FetchPages,
    LocalPrefill,
    Placement,
    Policy,
    PrefillView,
    Reason,
    Snapshot,
    Strategy,
)
from router.policy import choose

BOTH = frozenset({"d0", "d1"})
MISSING = "no prefill worker is ready"

# A millisecond a token, ten a step, one for each request in it; 100 KB a millisecond.
COSTS = Costs(
    prefill=(0.0, 1e-3, 0.0, 1e-3, 1e-4),
    local=(0.0, 1e-3, 0.0, 1e-3, 1e-4, 0.0),
    transfer=(0.0, 1e-8),
    exposed=(0.0, 1.0),
    fetch=(2e-2, 1e-8),
    step=(1e-2, 1e-3, 0.0, 0.0),
    answer_tokens=100.0,
)


def prefill(
    name: str,
    pending: int = 0,
    reaches: frozenset[str] = BOTH,
    room: bool = True,
    cached: int = 0,
) -> PrefillView:
    return PrefillView(name, pending, reaches, room, cached)


def decode(
    name: str,
    requests: int = 0,
    free: int = 1000,
    room: bool = True,
    cached: int = 0,
    waiting: int = 0,
    pending: int = 0,
) -> DecodeView:
    running = requests - waiting
    return DecodeView(name, requests, free, room, cached, running, waiting, 0, pending)


def placed(snapshot: Snapshot) -> Placement:
    found = choose(snapshot)
    assert isinstance(found, Placement), found
    return found


def where(snapshot: Snapshot) -> tuple[str, str]:
    found = placed(snapshot)
    return found.prefill, found.decode


def asked(snapshot: Snapshot, tokens: int, **more: object) -> Snapshot:
    """For a prompt of so many tokens, in a cluster whose costs are known."""
    known = dataclasses.replace(
        snapshot, prompt_tokens=tokens, tokens_wanted=100, costs=COSTS, page_bytes=160_000
    )
    return dataclasses.replace(known, **more)  # type: ignore[arg-type]


LOADS = [
    (Snapshot([prefill("p0")], [decode("d0")]), ("p0", "d0")),
    (Snapshot([prefill("p0", 9), prefill("p1", 3)], [decode("d0")]), ("p1", "d0")),
    (Snapshot([prefill("p0")], [decode("d0", 4), decode("d1", 2)]), ("p0", "d1")),
    (Snapshot([prefill("p0")], [decode("d0", 1, 0), decode("d1", 1, 8)]), ("p0", "d1")),
    (
        Snapshot([prefill("p0", 0, frozenset({"d1"}))], [decode("d0"), decode("d1", 7)]),
        ("p0", "d1"),
    ),
    (Snapshot([prefill("p0", 0, frozenset()), prefill("p1", 5)], [decode("d0")]), ("p1", "d0")),
    (Snapshot([prefill("p0")], [decode("d0", room=False), decode("d1", 9)]), ("p0", "d1")),
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
    snapshot = Snapshot(
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
            Snapshot([prefill("p0"), prefill("p1", 300, cached=896)], [decode("d0")]),
            ("p1", "d0"),
            Reason.CACHED,
        ),
        # Until the queue is longer than what the cache saves.
        (
            Snapshot([prefill("p0"), prefill("p1", 900, cached=896)], [decode("d0")]),
            ("p0", "d0"),
            Reason.CACHE_BUSY,
        ),
        (
            Snapshot([prefill("p0", cached=160), prefill("p1", cached=896)], [decode("d0")]),
            ("p1", "d0"),
            Reason.CACHED,
        ),
        # Pages that decode has need not travel, though the worker is a little busier.
        (
            Snapshot([prefill("p0", cached=992)], [decode("d0"), decode("d1", cached=992)]),
            ("p0", "d1"),
            Reason.CACHED,
        ),
        # But its other requests count for more than a transfer.
        (
            Snapshot([prefill("p0", cached=992)], [decode("d0"), decode("d1", 9, cached=992)]),
            ("p0", "d0"),
            Reason.CACHED,
        ),
        # A worker where others wait for room is not waited for.
        (
            Snapshot([prefill("p0")], [decode("d0", 4), decode("d1", 4, waiting=3)]),
            ("p0", "d0"),
            Reason.LEAST_TIME,
        ),
        # A pool without room for the prompt is avoided.
        (
            Snapshot([prefill("p0")], [decode("d0", 4, free=10), decode("d1", 5)]),
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
    return view._replace(cached_tokens=tokens, kept_tokens=tokens)


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
    assert where(asked(Snapshot(workers, [decode("d0")]), 1000)) == (expected, "d0")


def test_a_decode_worker_brings_pages_back_while_the_prompt_is_computed() -> None:
    keeps = decode("d0")._replace(cached_tokens=896, kept_tokens=896)
    lacks, has = decode("d1"), decode("d1", cached=896)
    slow = Snapshot([prefill("p0")], [keeps, lacks])
    assert where(asked(slow, 1000)) == ("p0", "d0"), "hidden, and nothing to transfer"
    quick = Snapshot([prefill("p0", cached=992)], [keeps, has])
    assert where(asked(quick, 1000, local=LocalPrefill.NEVER)) == ("p0", "d1")


@pytest.mark.parametrize("strategy", [Strategy.LEAST_LOADED, Strategy.ROUND_ROBIN])
def test_the_other_strategies_know_nothing_of_caches(strategy: Strategy) -> None:
    snapshot = Snapshot(
        [prefill("p0"), prefill("p1", cached=992)], [decode("d0"), decode("d1", cached=992)]
    )
    found = placed(asked(snapshot, 1000, strategy=strategy, local=LocalPrefill.AUTO))
    assert (found.prefill, found.decode, found.code) == ("p0", "d0", Reason(strategy.value))


def test_the_best_pair_is_found_whoever_reaches_whom() -> None:
    views = [prefill(f"p{i}", 7 * i % 5, frozenset({f"d{i}"})) for i in range(8)]
    others = [decode(f"d{i}", 3 * i % 4) for i in range(8)]
    found = placed(asked(Snapshot(views, others), 100))
    # p5 and p0 have nothing pending; of their only decode workers d0 has fewer requests.
    assert (found.prefill, found.decode) == ("p0", "d0")


@pytest.mark.parametrize(
    ("snapshot", "pages"),
    [
        # 62 pages of 160 KB take 0.1 s, computing them 1 s.
        (Snapshot([prefill("p0")], [decode("d0", cached=992)]), 62),
        # What is here is not fetched again.
        (Snapshot([prefill("p0", cached=960)], [decode("d0", cached=992)]), 62),
        (Snapshot([prefill("p0", cached=992)], [decode("d0", cached=992)]), 0),
        # A page takes longer to ask for than to compute.
        (Snapshot([prefill("p0", cached=976)], [decode("d0", cached=992)]), 0),
        # Unless others are computed meanwhile.
        (Snapshot([prefill("p0", 100, cached=976)], [decode("d0", cached=992)]), 62),
        (Snapshot([prefill("p0", 0, frozenset({"d1"}))], [decode("d0", cached=992)]), None),
        # The answer need not be written where the pages are.
        (Snapshot([prefill("p0")], [decode("d0", 9, cached=992, room=False), decode("d1")]), 62),
    ],
)
def test_pages_are_fetched_where_that_is_predicted_to_take_less_than_computing_them(
    snapshot: Snapshot, pages: int | None
) -> None:
    found = choose(asked(snapshot, 1000))
    if pages is None:
        assert isinstance(found, Unavailable)
        return
    assert isinstance(found, Placement)
    assert (found.fetch.pages if found.fetch else 0) == pages
    assert (found.code is Reason.FETCHED) is bool(pages)


def test_a_prompt_waits_for_what_it_fetches_as_long_as_that_saves() -> None:
    found = placed(asked(Snapshot([prefill("p0", cached=160)], [decode("d0", cached=992)]), 1000))
    assert found.fetch == Fetch("d0", 62, 832, pytest.approx(0.832))
    assert found.forecast is not None
    assert found.forecast.first_token_seconds == pytest.approx(0.02 + 0.0832 + 0.008)
    assert found.forecast.cached_tokens == 992


def test_what_prefill_keeps_in_its_second_tier_is_fetched_with_what_follows_it() -> None:
    keeps = prefill("p0")._replace(cached_tokens=320, kept_tokens=160)
    found = placed(asked(Snapshot([keeps], [decode("d0", cached=992)]), 1000))
    assert found.fetch is not None
    assert (found.fetch.pages, found.fetch.tokens) == (62, 832)


@pytest.mark.parametrize(
    ("mode", "cached", "fetched"),
    [
        (FetchPages.NEVER, 0, False),
        (FetchPages.AUTO, 0, True),
        (FetchPages.AUTO, 976, False),
        (FetchPages.ALWAYS, 976, True),
        (FetchPages.ALWAYS, 992, False),
    ],
)
def test_the_mode_says_whether_pages_are_fetched(
    mode: FetchPages, cached: int, fetched: bool
) -> None:
    snapshot = Snapshot([prefill("p0", cached=cached)], [decode("d0", cached=992)])
    assert (placed(asked(snapshot, 1000, fetch=mode)).fetch is not None) is fetched


AUTO = LocalPrefill.AUTO


@pytest.mark.parametrize(
    ("snapshot", "tokens", "policy", "code"),
    [
        # An idle decode worker is spared the transfer.
        (Snapshot([prefill("p0", 50)], [decode("d0")]), 64, Policy.LOCAL, Reason.LOCAL_FASTER),
        # One with answers to write is spared the prompt.
        (Snapshot([prefill("p0", 50)], [decode("d0", 4)]), 64, Policy.SPLIT, Reason.LEAST_TIME),
        # Unless it has all but the last words of it.
        (
            Snapshot([prefill("p0")], [decode("d0", 4, cached=992)]),
            1000,
            Policy.LOCAL,
            Reason.LOCAL_FASTER,
        ),
        # A prefill worker that has the prompt too is as fast, and disturbs nobody.
        (
            Snapshot([prefill("p0", cached=992)], [decode("d0", 4, cached=992)]),
            1000,
            Policy.SPLIT,
            Reason.CACHED,
        ),
        # Long prompts wait neither behind others there,
        (Snapshot([prefill("p0")], [decode("d0", 1, pending=800)]), 500, Policy.SPLIT, None),
        # nor do they when prefill is hopelessly behind.
        (Snapshot([prefill("p0", 9000)], [decode("d0", 1)]), 500, Policy.LOCAL, None),
    ],
)
def test_prompts_are_read_where_that_is_predicted_to_take_less(
    snapshot: Snapshot, tokens: int, policy: Policy, code: Reason | None
) -> None:
    found = placed(asked(snapshot, tokens, local=AUTO))
    assert found.policy is policy
    assert code is None or found.code is code
    if policy is Policy.LOCAL:
        assert not found.prefill


@pytest.mark.parametrize("seconds", [0.002, 0.5])
def test_the_first_prompt_that_comes_again_is_read_where_it_is_cached(seconds: float) -> None:
    """Of prefill nothing is known yet but what decode has shown."""
    costs = CostModel()
    costs.note_local(64, 0, 0, 0, seconds)
    snapshot = Snapshot([prefill("p0")], [decode("d0", cached=48)], costs=costs.costs, local=AUTO)
    found = placed(dataclasses.replace(snapshot, prompt_tokens=64, page_bytes=160_000))
    assert (found.policy, found.decode) == (Policy.LOCAL, "d0")


@pytest.mark.parametrize(
    ("mode", "policy"),
    [
        (LocalPrefill.AUTO, Policy.LOCAL),
        (LocalPrefill.ALWAYS, Policy.LOCAL),
        (LocalPrefill.FALLBACK, Policy.SPLIT),
        (LocalPrefill.NEVER, Policy.SPLIT),
    ],
)
def test_the_mode_says_who_may_read_prompts(mode: LocalPrefill, policy: Policy) -> None:
    snapshot = Snapshot([prefill("p0", 50)], [decode("d0")], local=mode)
    assert placed(asked(snapshot, 64, local=mode)).policy is policy


def test_a_placement_says_what_was_predicted() -> None:
    snapshot = Snapshot([prefill("p0", 300, cached=896)], [decode("d0")])
    forecast = placed(asked(snapshot, 1000)).forecast
    assert forecast is not None
    assert forecast.first_token_seconds == pytest.approx(0.404)
    assert (forecast.pending_tokens, forecast.cached_tokens) == (300, 896)


@pytest.mark.parametrize(
    ("snapshot", "error", "words"),
    [
        (Snapshot(), Unavailable, "no prefill worker"),
        (Snapshot(decode=[decode("d0")]), Unavailable, "no prefill worker"),
        (Snapshot(prefill=[prefill("p0")]), Unavailable, "no decode worker"),
        (Snapshot(prefill=[prefill("p0")], local_prefill=True), Unavailable, "no decode worker"),
        (Snapshot([prefill("p0", 0, frozenset())], [decode("d0")]), Unavailable, "connected"),
        (
            Snapshot([prefill("p0", 0, frozenset())], [decode("d0")], ["page_size 16 and 32"]),
            LayoutMismatch,
            "page_size 16 and 32",
        ),
        (Snapshot([prefill("p0")], [decode("d0", room=False)]), Exhausted, "decode worker is full"),
        (
            Snapshot([prefill("p0", room=False)], [decode("d0")]),
            Exhausted,
            "prefill worker is full",
        ),
        (
            Snapshot([], [decode("d0", room=False)], local_prefill=True),
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
        (Snapshot([], [decode("d0", 3), decode("d1", 2)], local_prefill=True), "d1", MISSING),
        (Snapshot([], [decode("d0"), decode("d1", 2)], local_prefill=True), "d0", MISSING),
        (
            Snapshot([prefill("p0", 0, frozenset())], [decode("d0")], local_prefill=True),
            "d0",
            "no prefill worker is connected to a decode worker yet",
        ),
    ],
)
def test_decode_workers_read_prompts_when_no_prefill_worker_can(
    snapshot: Snapshot, name: str, reason: str
) -> None:
    assert choose(snapshot) == Placement("", name, Policy.LOCAL, reason, Reason.NO_PREFILL)


def test_pools_that_do_not_fit_are_not_hidden_by_local_prefill() -> None:
    snapshot = Snapshot([prefill("p0", 0, frozenset())], [decode("d0")], ["differ"], True)
    assert isinstance(choose(snapshot), LayoutMismatch)


def test_prefill_that_is_merely_busy_is_waited_for() -> None:
    snapshot = Snapshot([prefill("p0", 9000)], [decode("d0")], local_prefill=True)
    assert where(snapshot) == ("p0", "d0")


@pytest.mark.parametrize(
    ("snapshot", "prefill_worker", "decode_worker"),
    [
        (Snapshot([prefill("p0", 5), prefill("p1", 4)]), "p1", ""),
        (Snapshot([prefill("p0", 5), prefill("p1", 4, room=False)], [decode("d0")]), "p0", ""),
        (Snapshot([], [decode("d0")], local_prefill=True), "", "d0"),
    ],
)
def test_one_token_needs_no_decode_worker(
    snapshot: Snapshot, prefill_worker: str, decode_worker: str
) -> None:
    found = choose(snapshot, one_token=True)
    assert isinstance(found, Placement)
    assert (found.prefill, found.decode) == (prefill_worker, decode_worker)

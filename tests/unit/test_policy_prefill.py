"""Where a prompt is read, and what of it is fetched."""

from __future__ import annotations

import dataclasses

import pytest
from snapshots import asked, cluster, decode, placed, prefill

from baton.core.errors import Unavailable
from baton.core.types import Role
from baton.router.placement.cost_model import CostModel
from baton.router.placement.placement import (
    FetchPages,
    FetchPlan,
    LocalPrefill,
    Placement,
    Policy,
    Reason,
    Snapshot,
)
from baton.router.placement.policy import choose


@pytest.mark.parametrize(
    ("snapshot", "pages"),
    [
        # 62 pages of 160 KB take 0.1 s, computing them 1 s.
        (cluster([prefill("p0")], [decode("d0", cached=992)]), 62),
        # What is here is not fetched again.
        (cluster([prefill("p0", cached=960)], [decode("d0", cached=992)]), 62),
        (cluster([prefill("p0", cached=992)], [decode("d0", cached=992)]), 0),
        # A page takes longer to ask for than to compute.
        (cluster([prefill("p0", cached=976)], [decode("d0", cached=992)]), 0),
        # Unless others are computed meanwhile.
        (cluster([prefill("p0", 100, cached=976)], [decode("d0", cached=992)]), 62),
        (cluster([prefill("p0", 0, frozenset({"d1"}))], [decode("d0", cached=992)]), None),
        # The answer need not be written where the pages are.
        (cluster([prefill("p0")], [decode("d0", 9, cached=992, room=False), decode("d1")]), 62),
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
    found = placed(asked(cluster([prefill("p0", cached=160)], [decode("d0", cached=992)]), 1000))
    assert found.fetch == FetchPlan("d0", 62, 832, pytest.approx(0.832))
    assert found.forecast is not None
    assert found.forecast.first_token_seconds == pytest.approx(0.02 + 0.0832 + 0.008)
    assert found.forecast.cached_tokens == 992


def test_what_prefill_keeps_in_its_second_tier_is_fetched_with_what_follows_it() -> None:
    keeps = prefill("p0")._replace(cached_tokens=320, saved_tokens=160)
    found = placed(asked(cluster([keeps], [decode("d0", cached=992)]), 1000))
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
    snapshot = cluster([prefill("p0", cached=cached)], [decode("d0", cached=992)])
    assert (placed(asked(snapshot, 1000, fetch=mode)).fetch is not None) is fetched


AUTO = LocalPrefill.AUTO


@pytest.mark.parametrize(
    ("snapshot", "tokens", "policy", "code"),
    [
        # An idle decode worker is spared the transfer.
        (cluster([prefill("p0", 50)], [decode("d0")]), 64, Policy.LOCAL, Reason.LOCAL_FASTER),
        # One with answers to write is spared the prompt.
        (cluster([prefill("p0", 50)], [decode("d0", 4)]), 64, Policy.SPLIT, Reason.LEAST_TIME),
        # Unless it has all but the last words of it.
        (
            cluster([prefill("p0")], [decode("d0", 4, cached=992)]),
            1000,
            Policy.LOCAL,
            Reason.LOCAL_FASTER,
        ),
        # A prefill worker that has the prompt too is as fast, and disturbs nobody.
        (
            cluster([prefill("p0", cached=992)], [decode("d0", 4, cached=992)]),
            1000,
            Policy.SPLIT,
            Reason.CACHED,
        ),
        # Long prompts wait neither behind others there,
        (cluster([prefill("p0")], [decode("d0", 1, pending=800)]), 500, Policy.SPLIT, None),
        # nor do they when prefill is hopelessly behind.
        (cluster([prefill("p0", 9000)], [decode("d0", 1)]), 500, Policy.LOCAL, None),
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
    costs.note_prompt(Role.DECODE, 64, 0, 0, seconds)
    snapshot = cluster([prefill("p0")], [decode("d0", cached=48)], costs=costs.costs, local=AUTO)
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
    snapshot = cluster([prefill("p0", 50)], [decode("d0")], local=mode)
    assert placed(asked(snapshot, 64, local=mode)).policy is policy

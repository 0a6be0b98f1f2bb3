"""What a router counts of what is asked of it."""

from __future__ import annotations

import pytest

from baton.router.observe.demand import Counts, Demand
from baton.router.observe.ledger import AnswerLedger
from baton.router.placement.cost_model import Costs
from baton.router.placement.placement import Placement, Policy

COSTS = Costs(prefill=(0.1, 0.01, 0.0, 0.01, 0.0))


def ledger(prefill: str = "prefill-0") -> AnswerLedger:
    """Of a prompt of 100 tokens, 60 of them cached, in a second and a half."""
    return AnswerLedger(
        arrived=10.0,
        ready=10.1,
        placed=10.3,
        first=11.5,
        prefill_wait=0.3,
        prefill_seconds=0.6,
        prompt_tokens=100,
        cached_tokens=60,
        tokens=8,
        placement=Placement(prefill, "decode-0", Policy.SPLIT if prefill else Policy.LOCAL),
    )


def test_a_prompt_counts_with_what_it_costs_beyond_what_was_cached() -> None:
    demand = Demand()
    demand.prefilled(ledger(), COSTS)
    counts = demand.take()
    assert counts.prompt_seconds == [pytest.approx(0.1 + 40 * 0.01)]
    assert counts.overhead_seconds == pytest.approx(1.5 - 0.2 - 0.3 - 0.6)


def test_a_prompt_that_a_decode_worker_reads_costs_prefill_nothing() -> None:
    demand = Demand()
    demand.prefilled(ledger(prefill=""), COSTS)
    assert demand.take().prompt_seconds == [0.0]


def test_an_answer_counts_with_the_pages_that_it_held() -> None:
    demand = Demand()
    demand.answer(ledger(), page_size=16)
    counts = demand.take()
    assert (counts.answers, counts.answer_tokens) == (1, 8)
    assert counts.page_tokens == pytest.approx(8 * (100 + 4) / 16)


def test_what_was_taken_is_forgotten() -> None:
    demand = Demand()
    demand.arrive(3)
    assert demand.take().arrivals == 3
    assert demand.take() == Counts()

"""The traffic that a router counts for the planner."""

from __future__ import annotations

import pytest

from baton.router.observe.ledger import AnswerLedger
from baton.router.observe.trends import Demand
from baton.router.placement.cost_model import Costs, PromptCosts
from baton.router.placement.placement import Placement
from baton.v1.cluster_pb2 import RouterReport

COSTS = Costs(prefill=PromptCosts(0.1, 0.01, 0.0, 0.01, 0.0))


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
        placement=Placement(prefill, "decode-0"),
    )


def test_a_prompt_counts_with_its_cost_without_cached_tokens() -> None:
    demand = Demand()
    demand.prefilled(ledger(), COSTS)
    counts = demand.drain()
    assert counts.prompt_seconds == [pytest.approx(0.1 + 40 * 0.01)]
    assert counts.overhead_seconds == pytest.approx(1.5 - 0.2 - 0.3 - 0.6)


def test_a_local_prefill_costs_prefill_workers_nothing() -> None:
    demand = Demand()
    demand.prefilled(ledger(prefill=""), COSTS)
    assert demand.drain().prompt_seconds == [0.0]


def test_an_answer_counts_with_the_pages_that_it_held() -> None:
    demand = Demand()
    demand.answer(ledger(), lambda tokens: tokens / 16)
    counts = demand.drain()
    assert (counts.answers, counts.answer_tokens) == (1, 8)
    assert counts.page_tokens == pytest.approx(8 * (100 + 4) / 16)


def test_drained_counts_are_forgotten() -> None:
    demand = Demand()
    demand.arrive(3)
    assert demand.drain().arrivals == 3
    assert demand.drain() == RouterReport()

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from baton.core.config import RouterConfig
from baton.core.types import LAST_PRIORITY, AttemptKey, Sampling, Work
from baton.router.observe.ledger import AnswerLedger
from baton.router.observe.metrics import RouterMetrics
from baton.router.placement.cost_model import CostModel, Costs
from baton.router.placement.placement import FetchPlan, Forecast, Placement
from baton.router.placement.placer import Placer
from baton.router.requests.admission import Assignment
from baton.router.requests.feedback import Feedback
from baton.router.workers.link import WorkerLink
from baton.v1 import worker_pb2 as pb
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout

WORK = Work(AttemptKey("r", 1), [1] * 100, Sampling(), 9, frozenset())
FORECAST = Forecast(0.5, 200, 64)
SPLIT = Placement("p0", "d0", forecast=FORECAST)
LOCAL = Placement("", "d0", forecast=FORECAST)


def link(name: str) -> WorkerLink:
    return WorkerLink(name, "router", "tiny", RouterConfig(), lambda link: None)


@dataclass
class Known:
    """The part of a placer that feedback uses."""

    costs: CostModel = field(default_factory=CostModel)
    prefill_busy_seconds: float = 0.0

    def pages_held(self, tokens: float) -> float:
        return tokens / 16


def assigned(placement: Placement) -> Assignment:
    prefill = link("p0") if placement.prefill else None
    return Assignment(placement, prefill, link("d0"))


def first(cached: int) -> pb.WorkerMessage:
    token = pb.FirstToken(queue_seconds=4.0, compute_seconds=9.0, cached_tokens=cached)
    return pb.WorkerMessage(first_token=token)


def step(cached: int) -> pb.StepTokens:
    tokens = pb.StepTokens(request_id="r", epoch=1, token_ids=[1], cached_tokens=cached)
    tokens.queue_seconds, tokens.compute_seconds = 4.0, 9.0
    return tokens


def test_a_prefills_times_are_learned_for_what_it_computed() -> None:
    cluster, assignment = Known(), assigned(SPLIT)
    costs = cluster.costs
    feedback = Feedback(WORK, assignment, cast(Placer, cluster), RouterMetrics(), AnswerLedger(0.0))
    feedback.note(first(64))
    feedback.note(pb.WorkerMessage(pushed=pb.Pushed(bytes=10**6, seconds=2.0)))
    assert costs.costs.prefill.seconds(36, 64, 200) == pytest.approx(13.0, rel=0.01)
    assert costs.costs.transfer_seconds(10**6) == pytest.approx(2.0, rel=0.01)
    assert assignment.prefiller is assignment.prefill
    hits = assignment.prefiller.assigned
    assert (hits.cached_tokens, hits.prompt_tokens) == (64, 100)


def test_what_decode_had_is_counted_beside_what_prefill_had() -> None:
    assignment = assigned(SPLIT)
    feedback = Feedback(WORK, assignment, cast(Placer, Known()), RouterMetrics(), AnswerLedger(0.0))
    feedback.note(pb.WorkerMessage(reserved=pb.Reserved(cached_tokens=32)))
    assert assignment.prefill is not None
    assert assignment.decode is not None
    assert [link.assigned.cached_tokens for link in assignment.links] == [0, 32]


def test_a_prompt_read_on_the_decode_worker_teaches_once() -> None:
    cluster, assignment = Known(), assigned(LOCAL)
    costs = cluster.costs
    feedback = Feedback(WORK, assignment, cast(Placer, cluster), RouterMetrics(), AnswerLedger(0.0))
    feedback.note_step(step(64))
    learned = costs.costs
    # What the worker says of its queue and its compute, as of prefill.
    assert learned.local.seconds(36, 64, 200, 3) == pytest.approx(13.0, rel=0.01)
    feedback.note_step(step(0))
    assert costs.costs == learned
    hits = assignment.prefiller.assigned
    assert (hits.cached_tokens, hits.prompt_tokens) == (64, 100)


def fetched(tokens: int) -> pb.WorkerMessage:
    token = pb.FirstToken(queue_seconds=4.0, compute_seconds=9.0, cached_tokens=64)
    token.fetched_tokens, token.fetch_seconds = tokens, 3.0
    return pb.WorkerMessage(first_token=token)


@pytest.mark.parametrize("tokens", [64, 0])
def test_a_fetch_is_learned_for_itself_whether_it_came_or_not(tokens: int) -> None:
    placement = Placement("p0", "d0", forecast=FORECAST, fetch=FetchPlan("d0", 4, 64, 9.0))
    cluster, assignment = Known(), assigned(placement)
    costs = cluster.costs
    assert assignment.prefill is not None
    pool = PoolAddress(page_bytes=10**6, layout=PoolLayout(page_size=16))
    assignment.prefill.welcome = pb.Welcome(pool=pool)
    Feedback(WORK, assignment, cast(Placer, cluster), RouterMetrics(), AnswerLedger(0.0)).note(
        fetched(tokens)
    )
    assert costs.costs.fetch_seconds(4 * 10**6) == pytest.approx(3.0, rel=0.01)
    assert costs.costs.prefill.seconds(36, 64) == pytest.approx(9.0, rel=0.01)


def test_a_canary_teaches_nothing() -> None:
    cluster, assignment = Known(), assigned(Placement("p0", ""))
    Feedback(WORK, assignment, cast(Placer, cluster), RouterMetrics(), AnswerLedger(0.0)).note(
        first(0)
    )
    assert cluster.costs.costs == Costs()
    assert assignment.prefiller.assigned.prompt_tokens == 0


def test_a_prompt_that_may_have_paused_teaches_nothing() -> None:
    cluster, assignment = Known(), assigned(SPLIT)
    work = replace(WORK, priority=LAST_PRIORITY)
    feedback = Feedback(work, assignment, cast(Placer, cluster), RouterMetrics(), AnswerLedger(0.0))
    assignment.prefiller.paused_at = time.monotonic()
    before = cluster.costs.costs
    feedback.note(first(64))
    assert cluster.costs.costs == before

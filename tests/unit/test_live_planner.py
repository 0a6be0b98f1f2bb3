"""Decisions of the live planner from routers' reports."""

from __future__ import annotations

import dataclasses

from baton.cluster.planning import ROUTER_SILENT_SECONDS, PlanRounds
from baton.core.config import Config, DecodeConfig, PlannerConfig, PrefillConfig
from baton.core.types import Role
from baton.planner.sizing import Decision, Pools
from baton.v1.cluster_pb2 import RouterReport

CONFIG = Config(
    device="cpu",
    prefill=PrefillConfig(workers=2),
    decode=DecodeConfig(workers=2),
    planner=PlannerConfig(enabled=True, ttft=2.0, itl=0.05, most_workers=6),
)
HAVE = Pools(2, 2)


def report(router: str = "r", arrivals: int = 4, seconds: float = 0.1) -> RouterReport:
    """One second: so many prompts of so many seconds, and as many short answers."""
    return RouterReport(
        router_id=router,
        arrivals=arrivals,
        prompt_seconds=[seconds] * arrivals,
        answers=arrivals,
        answer_tokens=20 * arrivals,
        page_tokens=200.0 * arrivals,
        step_costs=[0.01, 1e-4, 1e-7, 0.0],
        decode_pages=1000,
    )


def decide(*reports: RouterReport, have: Pools = HAVE, count: int = 1) -> Decision:
    """After rounds of ten seconds in each of which these came."""
    rounds = PlanRounds(CONFIG, gpus=False)
    for second in range(10 * count):
        for each in reports:
            rounds.report(each, float(second))
        if second % 10 == 9:
            decision = rounds.end(have, float(second))
    return decision


def test_without_traffic_nothing_changes() -> None:
    assert not decide().changes


def test_an_overloaded_prefill_pool_takes_a_spare_decode_worker() -> None:
    decision = decide(report(arrivals=12, seconds=0.2))
    assert decision.switch is not None
    assert (decision.switch.to, decision.switch.count) == (Role.PREFILL, 1)
    assert any("decode can spare 1" in reason for reason in decision.reasons)


def test_the_traffic_of_several_routers_is_summed() -> None:
    alone = decide(report(arrivals=12, seconds=0.2))
    together = decide(report("a", 6, 0.2), report("b", 6, 0.2))
    assert together.need == alone.need


def test_requests_on_workers_count_once_and_each_routers_queue_too() -> None:
    one, two = report("a"), report("b")
    for each in (one, two):
        each.waiting, each.queued_requests = 30, 10
    rounds = PlanRounds(CONFIG, gpus=False)
    for each in (one, two):
        rounds.report(each, 0.0)
    assert rounds._observe(HAVE, 1.0).waiting == 30 + 2 * 10


def test_a_silent_routers_queue_does_not_count() -> None:
    rounds = PlanRounds(CONFIG, gpus=False)
    last = report()
    last.queued_seconds = 100.0
    rounds.report(last, 0.0)
    assert rounds._observe(HAVE, ROUTER_SILENT_SECONDS).queued_seconds == 100.0
    assert rounds._observe(HAVE, ROUTER_SILENT_SECONDS + 1.0).queued_seconds == 0.0


def test_the_default_limit_is_the_number_of_workers_at_the_start() -> None:
    config = Config(prefill=PrefillConfig(workers=3), planner=PlannerConfig(enabled=True))
    assert PlanRounds(config, gpus=False).goals.most_workers == 4


def test_missing_workers_are_reported_once() -> None:
    config = dataclasses.replace(
        CONFIG, planner=dataclasses.replace(CONFIG.planner, most_workers=4)
    )
    rounds = PlanRounds(config, gpus=False)
    for second in range(30):
        rounds.report(report(arrivals=40, seconds=0.2), float(second))
        if second % 10 == 9:
            rounds.end(Pools(3, 1), float(second))
    (planned,) = rounds.describe().changes
    assert planned.need_prefill + planned.need_decode > 4


def test_decisions_with_changes_are_kept_with_their_reasons() -> None:
    rounds = PlanRounds(CONFIG, gpus=False)
    for second in range(10):
        rounds.report(report(arrivals=12, seconds=0.2), float(second))
    rounds.end(HAVE, 10.0, clock=lambda: 1234.0)
    (planned,) = rounds.describe().changes
    assert planned.at == 1234.0
    assert planned.reasons


def test_an_idle_cluster_keeps_the_least_workers_of_each_role() -> None:
    settings = dataclasses.replace(CONFIG.planner, least_prefill=1, least_decode=2)
    rounds = PlanRounds(dataclasses.replace(CONFIG, planner=settings), gpus=False)
    decisions = [rounds.end(Pools(3, 3), 10.0 * number) for number in range(40)]
    (drained,) = [decision for decision in decisions if decision.changes][:1]
    assert drained.drain == Pools(2, 1)

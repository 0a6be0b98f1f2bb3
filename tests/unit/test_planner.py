from __future__ import annotations

import dataclasses
import random

import pytest

from baton.core.types import Role
from baton.planner.queueing import (
    DecodeLoad,
    PrefillLoad,
    decode_workers,
    late_share,
    prefill_workers,
)
from baton.planner.sizing import (
    NONE,
    Decision,
    Goals,
    Observation,
    PlannerState,
    Pools,
    Switch,
    plan,
)
from baton.planner.traffic_window import Window
from baton.router.placement.cost_model import Costs

GOALS = Goals(ttft=1.0, itl=0.02, most_workers=40)
# Ten milliseconds a step, and a tenth of one for each request in it.
COSTS = Costs(step=(1e-2, 1e-4, 0.0, 0.0))


def window(rate: float = 20.0, compute: float = 0.2, answer: float = 1000.0) -> Window:
    return Window(
        seconds=60.0,
        requests=round(60 * rate),
        recent_seconds=20.0,
        recent_requests=round(20 * rate),
        compute_seconds=[compute / 2, compute, compute * 1.5],
        answer_tokens=answer,
        pages=100.0,
    )


def seen(have: Pools, seen_window: Window, queued: float = 0.0, waiting: int = 0) -> Observation:
    return Observation(
        have=have, window=seen_window, costs=COSTS, queued_seconds=queued, waiting=waiting
    )


def decide(observation: Observation, goals: Goals = GOALS) -> Decision:
    return plan(observation, PlannerState(), goals)[0]


def needed(seen_window: Window) -> Pools:
    return decide(seen(Pools(1, 1), seen_window)).need


def rounds(windows: list[Window], have: Pools, goals: Goals = GOALS) -> list[Decision]:
    """Each round's decision, when those before are carried out."""
    state, decisions = PlannerState(), []
    for each in windows:
        decision, state = plan(seen(have, each), state, goals)
        decisions.append(decision)
        have = after(decision)
    return decisions


def after(decision: Decision) -> Pools:
    have = decision.have
    for role in Role:
        have = have.with_more(role, decision.add.of(role) - decision.drain.of(role))
    if switch := decision.switch:
        have = have.with_more(switch.to, switch.count)
        have = have.with_more(
            Role.DECODE if switch.to is Role.PREFILL else Role.PREFILL, -switch.count
        )
    return have


def test_a_steady_load_changes_nothing() -> None:
    have = needed(window())
    assert not any(decision.changes for decision in rounds([window()] * 50, have))


def test_twice_the_load_asks_for_workers_of_both_roles_at_once() -> None:
    have = needed(window())
    decision = decide(seen(have, window(rate=40.0)))
    assert decision.add == needed(window(rate=40.0)).beyond(have)
    assert decision.add.prefill > 0
    assert decision.add.decode > 0


def test_half_the_load_drains_workers_once_it_has_lasted() -> None:
    decisions = rounds([window(rate=10.0)] * 40, needed(window()))
    first = next(at for at, decision in enumerate(decisions) if decision.changes)
    assert first == GOALS.patience - 1
    assert decisions[first].drain.total > 0
    assert decisions[-1].need.beyond(after(decisions[-1])) == NONE


def test_longer_prompts_and_shorter_answers_make_decode_workers_read_prompts() -> None:
    have = needed(window())
    decision = decide(seen(have, window(compute=0.3, answer=250.0)))
    assert decision.switch is not None
    assert decision.switch.to is Role.PREFILL


def test_shorter_prompts_and_longer_answers_make_prefill_workers_write_answers() -> None:
    have = needed(window(compute=0.4))
    decision = decide(seen(have, window(compute=0.1, answer=1500.0)))
    assert decision.switch is not None
    assert decision.switch.to is Role.DECODE


def test_new_workers_are_asked_for_only_beyond_what_can_change_its_role() -> None:
    need = needed(window(rate=40.0))
    decision = decide(seen(Pools(need.prefill - 3, need.decode + 40), window(rate=40.0)))
    assert decision.switch == Switch(Role.PREFILL, 3)
    assert decision.add == NONE


def test_a_load_that_goes_up_and_down_a_little_changes_nothing_any_more() -> None:
    source = random.Random(1)
    windows = [window(rate=20.0 * source.uniform(0.92, 1.08)) for _ in range(200)]
    decisions = rounds(windows, needed(window()))
    assert not any(decision.changes for decision in decisions[100:])
    assert sum(decision.changes for decision in decisions) <= 3


def peaks(calm: int, times: int) -> list[Window]:
    return ([window(rate=40.0)] + [window()] * calm) * times


def test_peaks_that_come_again_and_again_are_waited_out() -> None:
    calm = GOALS.patience + 10
    decisions = rounds(peaks(calm, 12), needed(window()))
    drains = [at for at, decision in enumerate(decisions) if decision.drain.total]
    assert 1 <= len(drains) <= 2
    assert not any(decision.changes for decision in decisions[6 * calm :])


def test_after_a_long_calm_workers_are_given_up_as_soon_as_at_first() -> None:
    windows = [*peaks(GOALS.patience + 10, 4), *[window()] * 300, *peaks(GOALS.patience, 1)]
    decisions = rounds(windows, needed(window()))
    assert decisions[-1].drain.total > 0


def test_a_pool_never_grows_beyond_the_limit_and_says_what_is_missing() -> None:
    goals = dataclasses.replace(GOALS, most_workers=8)
    decision = decide(seen(Pools(3, 3), window(rate=60.0)), goals)
    assert decision.add.total == 2
    assert decision.missing == decision.need.total - 8
    assert "8 workers are allowed" in decision.reasons[-1]


def test_a_pool_never_shrinks_below_the_least() -> None:
    goals = dataclasses.replace(GOALS, least=Pools(2, 3))
    decisions = rounds([window(rate=0.1)] * 40, Pools(6, 6), goals)
    assert after(decisions[-1]) == Pools(2, 3)


def test_what_has_not_been_measured_changes_nothing() -> None:
    assert not decide(seen(Pools(4, 4), Window())).changes


def test_without_any_request_all_but_the_least_are_drained_in_the_end() -> None:
    decisions = rounds([Window(seconds=60.0)] * 40, Pools(6, 6))
    assert not decisions[0].changes
    assert after(decisions[-1]) == GOALS.least


def test_a_backlog_asks_for_more_than_the_arrivals_do() -> None:
    have = needed(window())
    assert decide(seen(have, window(), queued=300.0)).add.prefill > 0
    assert decide(seen(have, window(), waiting=2000)).add.decode > 0


def test_the_last_seconds_count_where_they_clearly_have_more() -> None:
    grown = dataclasses.replace(window(), recent_requests=800)
    noisy = dataclasses.replace(window(), recent_requests=420)
    assert grown.rate == 40.0
    assert noisy.rate == 20.0


def test_a_decision_tells_its_reasons_with_the_numbers() -> None:
    decision = decide(seen(Pools(1, 1), window()))
    assert "20.00 prompts/s of 0.200 s each" in decision.reasons[0]
    assert "20.00 answers/s of 1000 tokens" in decision.reasons[1]
    assert decision.summary.startswith(f"add {decision.need.prefill - 1} prefill")


def test_one_prefill_worker_is_late_as_often_as_the_known_queue_says() -> None:
    # Independent arrivals, computes that do not vary: with exponential ones instead, the wait
    # of M/M/1 beyond t has the chance rho * exp(-(1 - rho) t / S).
    exponential = [0.1 * each for each in (0.105, 0.36, 0.69, 1.2, 2.645)]
    load = PrefillLoad(rate=5.0, compute_seconds=exponential)
    assert load.busy == pytest.approx(0.5, rel=1e-6)
    assert 0 < late_share(load, 1, 1.0) < 0.02
    assert late_share(load, 1, 0.2) > late_share(load, 2, 0.2)
    assert late_share(load, 1, 1.0) > late_share(load, 1, 2.0)


def test_arrivals_in_bursts_need_more_prefill_workers() -> None:
    even = PrefillLoad(20.0, [0.2], dispersion=1.0)
    bursts = PrefillLoad(20.0, [0.2], dispersion=10.0)
    assert prefill_workers(bursts, 1.0, 0.02) > prefill_workers(even, 1.0, 0.02)


def test_a_prompt_that_can_never_be_in_time_asks_for_nothing() -> None:
    assert prefill_workers(PrefillLoad(1.0, [0.1, 0.1, 5.0]), 1.0, 0.02) < 10


def test_decode_workers_hold_as_many_requests_as_their_pages_allow() -> None:
    load = DecodeLoad(10.0, 200.0, 100.0, step_seconds=1e-2, request_seconds=1e-4)
    roomy = decode_workers(load, 0.02, 256, 10**6)
    tight = decode_workers(load, 0.02, 256, 500)
    assert tight > roomy


def test_an_interval_that_no_worker_keeps_does_not_ask_for_ever_more_workers() -> None:
    load = DecodeLoad(10.0, 200.0, 100.0, step_seconds=1e-2, request_seconds=1e-4)
    assert decode_workers(load, 0.001, 256, 10**6) < 3

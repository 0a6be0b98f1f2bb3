from __future__ import annotations

import pytest

from baton.router.placement.placement import Suspicion
from baton.router.workers.link_state import (
    INPUTS_PER_REQUEST,
    AssignedRequests,
    BusyShare,
    Heartbeat,
    PingFence,
    StepPace,
)
from baton.v1 import worker_pb2 as pb


def heartbeat() -> Heartbeat:
    return Heartbeat(ping_seconds=1.0, frozen_seconds=3.0, stall_seconds=10.0)


def test_a_worker_that_answers_is_never_lost() -> None:
    made = heartbeat()
    for _ in range(100):
        assert made.next_ping(busy=False) == ""
        made.message_received()


def test_a_silent_worker_is_lost_after_frozen_seconds() -> None:
    made = heartbeat()
    assert [made.next_ping(busy=False) != "" for _ in range(4)] == [False, False, False, True]


def test_one_answer_is_enough() -> None:
    made = heartbeat()
    for _ in range(3):
        made.next_ping(busy=False)
    made.message_received()
    assert made.next_ping(busy=False) == ""


def test_a_busy_engine_that_reports_nothing_is_lost() -> None:
    made = heartbeat()
    verdicts = []
    for _ in range(11):
        verdicts.append(made.next_ping(busy=True))
        made.message_received()
    assert not any(verdicts[:10])
    assert "engine" in verdicts[10]


def test_a_long_step_between_reports_is_no_stall() -> None:
    made = heartbeat()
    for _ in range(5):
        for _ in range(9):
            assert made.next_ping(busy=True) == ""
            made.message_received()
        made.engine_reported()


def test_an_idle_engine_need_not_report() -> None:
    made = heartbeat()
    for _ in range(50):
        assert made.next_ping(busy=False) == ""
        made.message_received()


def test_a_busy_share_covers_the_last_seconds() -> None:
    busy = BusyShare()
    assert busy.share == 0.0
    for tenth in range(400):
        seconds = tenth / 10
        busy.report(seconds, max(seconds - 30.0, 0.0) / 2)
    assert busy.share == pytest.approx(0.5, abs=0.02)


def test_consecutive_steps_show_a_workers_pace() -> None:
    pace = StepPace()
    assert pace.drain(0.0, now=10.0) is None
    for number in range(5):
        pace.step(pb.Step(tokens=[pb.StepTokens(request_id="r")]), now=10.0 + 0.25 * number)
    # Prefill workers were busy for half of the time.
    assert pace.drain(0.5, now=11.0) == pytest.approx((4, 0.25, 0.5))
    assert pace.drain(0.5, now=12.0) is None
    # Another request is the oldest now: no telling what lies between.
    pace.step(pb.Step(tokens=[pb.StepTokens(request_id="s")]), now=99.0)
    assert pace.drain(0.5, now=99.0) is None
    # Nor after a pause.
    pace.interrupt()
    pace.step(pb.Step(tokens=[pb.StepTokens(request_id="s")]), now=100.0)
    assert pace.drain(0.5, now=100.0) is None


def test_a_closed_fence_opens_with_the_answer_to_the_latest_ping() -> None:
    fence = PingFence()
    fence.ping_sent()
    fence.ping_sent()
    fence.close()
    assert not fence.is_open
    assert not fence.answer_received()
    assert not fence.is_open
    assert fence.answer_received()
    assert fence.is_open


def test_many_inputs_of_the_embedding_model_take_one_place_in_a_backlog() -> None:
    assigned = AssignedRequests(2)
    for _ in range(2 * INPUTS_PER_REQUEST):
        assert assigned.admits(Suspicion.NONE)
        assigned.count_unanswered(+1, encoded=True)
    assert not assigned.admits(Suspicion.NONE)
    assigned.count_unanswered(-1, encoded=True)
    assert assigned.admits(Suspicion.NONE)
    assigned.count_unanswered(+1)
    assert not assigned.admits(Suspicion.NONE)

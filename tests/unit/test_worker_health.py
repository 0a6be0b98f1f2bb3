from __future__ import annotations

from baton.router.workers.health import Heartbeat


def heartbeat() -> Heartbeat:
    return Heartbeat(ping_seconds=1.0, frozen_seconds=3.0, stall_seconds=10.0)


def test_a_worker_that_answers_is_never_lost() -> None:
    made = heartbeat()
    for _ in range(100):
        assert made.next_ping(busy=False) == ""
        made.message_received()


def test_a_silent_worker_is_lost_after_the_bound() -> None:
    made = heartbeat()
    assert [made.next_ping(busy=False) != "" for _ in range(4)] == [False, False, False, True]


def test_one_answer_is_enough() -> None:
    made = heartbeat()
    for _ in range(3):
        made.next_ping(busy=False)
    made.message_received()
    assert made.next_ping(busy=False) == ""


def test_a_busy_engine_that_reports_nothing_counts_as_hung() -> None:
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


def test_an_idle_engine_need_not_move() -> None:
    made = heartbeat()
    for _ in range(50):
        assert made.next_ping(busy=False) == ""
        made.message_received()

from __future__ import annotations

from baton.router.workers.pulse import Pulse


def pulse() -> Pulse:
    return Pulse(ping_seconds=1.0, frozen_seconds=3.0, stall_seconds=10.0)


def test_a_worker_that_answers_is_never_lost() -> None:
    made = pulse()
    for _ in range(100):
        assert made.ping(busy=False) == ""
        made.heard()


def test_a_silent_worker_is_lost_after_the_bound() -> None:
    made = pulse()
    assert [made.ping(busy=False) != "" for _ in range(4)] == [False, False, False, True]


def test_one_answer_is_enough() -> None:
    made = pulse()
    for _ in range(3):
        made.ping(busy=False)
    made.heard()
    assert made.ping(busy=False) == ""


def test_a_busy_engine_that_reports_nothing_counts_as_hung() -> None:
    made = pulse()
    verdicts = []
    for _ in range(11):
        verdicts.append(made.ping(busy=True))
        made.heard()
    assert not any(verdicts[:10])
    assert "engine" in verdicts[10]


def test_a_long_step_between_reports_is_no_stall() -> None:
    made = pulse()
    for _ in range(5):
        for _ in range(9):
            assert made.ping(busy=True) == ""
            made.heard()
        made.reported()


def test_an_idle_engine_need_not_move() -> None:
    made = pulse()
    for _ in range(50):
        assert made.ping(busy=False) == ""
        made.heard()

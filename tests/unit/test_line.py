from __future__ import annotations

import pytest

from baton.core.errors import Exhausted
from baton.router.requests.line import Line


def test_the_first_to_come_is_the_head() -> None:
    line = Line(limit=10)
    for order in (1, 2, 3):
        line.join(order)
    assert line.head == 1
    line.leave(1)
    assert line.head == 2


def test_who_is_tried_again_keeps_its_place() -> None:
    line = Line(limit=10)
    line.join(5)
    line.join(6)
    line.join(2, again=True)
    assert line.head == 2


def test_a_full_line_refuses_and_says_when_to_come_back() -> None:
    line = Line(limit=2)
    line.join(1)
    line.join(2)
    with pytest.raises(Exhausted) as refused:
        line.join(3)
    assert refused.value.retry_after == 1.0


def test_a_full_line_takes_who_is_tried_again() -> None:
    line = Line(limit=1)
    line.join(4)
    line.join(3, again=True)
    assert len(line) == 2


def test_the_wait_is_estimated_from_how_fast_the_line_moves() -> None:
    line = Line(limit=100)
    for order in range(10):
        line.join(order)
    for now in range(0, 200, 2):
        line.admitted(float(now))
    assert line.retry_after == pytest.approx(20.0, rel=0.01)


def test_an_estimate_has_bounds() -> None:
    line = Line(limit=100)
    line.join(1)
    line.admitted(0.0)
    line.admitted(10_000.0)
    assert line.retry_after == 60.0

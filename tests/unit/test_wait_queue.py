from __future__ import annotations

import pytest

from baton.core.errors import Exhausted
from baton.router.requests.admission import WaitQueue


def test_the_first_to_come_is_the_head() -> None:
    queue = WaitQueue(limit=10)
    for order in (1, 2, 3):
        queue.join(order)
    assert queue.head == 1
    queue.leave(1)
    assert queue.head == 2


def test_who_is_tried_again_keeps_its_place() -> None:
    queue = WaitQueue(limit=10)
    queue.join(5)
    queue.join(6)
    queue.join(2, retry=True)
    assert queue.head == 2


def test_a_full_line_refuses_and_says_when_to_come_back() -> None:
    queue = WaitQueue(limit=2)
    queue.join(1)
    queue.join(2)
    with pytest.raises(Exhausted) as refused:
        queue.join(3)
    assert refused.value.retry_after == 1.0


def test_a_full_line_takes_who_is_tried_again() -> None:
    queue = WaitQueue(limit=1)
    queue.join(4)
    queue.join(3, retry=True)
    assert len(queue) == 2


def test_the_wait_is_estimated_from_how_fast_the_line_moves() -> None:
    queue = WaitQueue(limit=100)
    for order in range(10):
        queue.join(order)
    for now in range(0, 200, 2):
        queue.admitted(float(now))
    assert queue.retry_after == pytest.approx(20.0, rel=0.01)


def test_an_estimate_has_bounds() -> None:
    queue = WaitQueue(limit=100)
    queue.join(1)
    queue.admitted(0.0)
    queue.admitted(10_000.0)
    assert queue.retry_after == 60.0

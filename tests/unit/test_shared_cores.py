from __future__ import annotations

import pytest

from baton.planner.profile import SharedCores, weight


@pytest.mark.parametrize(
    ("prefill", "decode", "speed"),
    [(0, 1, 1.0), (1, 1, 1.0), (0, 2, 1.0), (1, 2, 0.5), (0, 4, 0.5), (2, 1, 0.01), (3, 2, 0.01)],
)
def test_decode_workers_that_stand_back_have_what_prefill_workers_leave(
    prefill: int, decode: int, speed: float
) -> None:
    cores = SharedCores(2, weight(19))
    assert cores.decode_speed(prefill, decode) == pytest.approx(speed, abs=0.01)


def test_workers_of_equal_weight_have_equal_parts_of_the_cores() -> None:
    assert SharedCores(2, weight(0)).decode_speed(2, 1) == pytest.approx(2 / 3)


def test_workers_with_hardware_of_their_own_are_never_slower() -> None:
    assert SharedCores(0, weight(19)).decode_speed(40, 120) == 1.0

from __future__ import annotations

from baton.core.metrics import Spread


def test_percentiles_are_values_that_were_measured() -> None:
    assert Spread.of([float(number) for number in range(1, 101)]) == Spread(50.5, 50, 90, 99)
    assert Spread.of([4.0, 2.0]) == Spread(3.0, 2.0, 4.0, 4.0)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 3.0)


def test_no_values_spread_over_nothing() -> None:
    assert Spread.of([]) == Spread(0.0, 0.0, 0.0, 0.0)

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from baton.core.online_fit import OnlineFit

TRUE = (0.02, 2e-3, 6e-8)
PRIOR = (5e-3, 1e-4, 3e-9)


def features(tokens: int, prefix: int = 0) -> tuple[float, float, float]:
    return 1.0, float(tokens), tokens * (prefix + tokens / 2)


def seconds(row: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(TRUE, row, strict=True))


def prompts(seed: int, count: int) -> list[tuple[float, float, float]]:
    draw = random.Random(seed)
    return [features(draw.randint(1, 2000), draw.choice([0, 0, 500, 3000])) for _ in range(count)]


def errors(fit: OnlineFit) -> list[float]:
    """Of predictions for short and long prompts, as factors."""
    rows = [features(10), features(100, 1000), features(2000), features(8000)]
    return [math.exp(abs(math.log(fit.predict(row) / seconds(row)))) for row in rows]


def test_before_any_measurement_the_prior_speaks() -> None:
    assert OnlineFit(PRIOR, 64).coefficients == PRIOR


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_one_measurement_sets_the_size(scale: float) -> None:
    fit = OnlineFit(PRIOR, 64)
    fit.note(features(500), 0.5 * scale)
    assert fit.predict(features(500)) == pytest.approx(0.5 * scale, rel=0.05)
    assert fit.predict(features(1000)) > fit.predict(features(500))


@pytest.mark.parametrize("seed", range(5))
def test_noisy_measurements_are_learned_for_all_lengths(seed: int) -> None:
    draw = random.Random(seed)
    fit = OnlineFit(PRIOR, 64)
    for row in prompts(seed, 300):
        fit.note(row, seconds(row) * draw.lognormvariate(0, 0.1))
    assert max(errors(fit)) < 1.3


@pytest.mark.parametrize("seed", range(5))
def test_outliers_count_for_little(seed: int) -> None:
    draw = random.Random(seed)
    fit = OnlineFit(PRIOR, 64)
    for row in prompts(seed, 300):
        fit.note(row, seconds(row) * (30 if draw.random() < 0.05 else 1))
    assert max(errors(fit)) < 1.5


def test_a_machine_that_slows_down_is_noticed_within_some_measurements() -> None:
    fit = OnlineFit(PRIOR, 64)
    for row in prompts(1, 200):
        fit.note(row, seconds(row))
    for row in prompts(2, 40):
        fit.note(row, 5 * seconds(row))
    row = features(1000)
    assert fit.predict(row) == pytest.approx(5 * seconds(row), rel=0.2)


def test_measurements_that_are_all_alike_leave_the_rest_to_the_prior() -> None:
    fit = OnlineFit(PRIOR, 64)
    for _ in range(100):
        fit.note(features(100), 0.2)
    assert fit.predict(features(100)) == pytest.approx(0.2, rel=0.01)
    assert 0.2 < fit.predict(features(200)) < 0.5


def test_no_coefficient_vanishes() -> None:
    fit = OnlineFit(PRIOR, 64)
    for row in prompts(3, 300):
        fit.note(row, 0.1)
    assert min(fit.coefficients) > 0


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_what_cannot_be_a_time_is_dropped(value: float) -> None:
    fit = OnlineFit(PRIOR, 64)
    fit.note(features(10), value)
    assert fit.coefficients == PRIOR


def test_times_of_zero_do_no_harm() -> None:
    fit = OnlineFit((1e-3,), 64)
    for _ in range(50):
        fit.note((1.0,), 0.0)
    assert 0 <= fit.predict((1.0,)) < 1e-4
    for _ in range(50):
        fit.note((1.0,), 0.5)
    assert fit.predict((1.0,)) == pytest.approx(0.5, rel=0.25)

"""Online fits of measured times. Pure: no I/O, no clock; a few microseconds each.

`OnlineFit` is least squares with exponential forgetting. A time is modelled as a sum of features
with positive coefficients, times a pace. The pace follows the latest measurements quickly, since a
busy machine slows everything down alike. The coefficients start at a prior and follow slowly.

Errors are relative to the prediction, so that short and long times are learned alike, and outliers
are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PRIOR_WEIGHT = 2.0
"""Weight of the prior, in measurements of each feature."""
LEAST_WEIGHT = 1e-9
"""A feature that was 0 for so long that its weight is below this keeps its prior."""
LEAST_SHARE = 0.01
"""No coefficient falls below this share of the prior's."""
OUTLIER = 3.0
"""Multiple of the usual error at which errors are bounded."""
FIRST_SPREAD = 0.3
LEAST_SPREAD = 0.02
SPREAD_RATE = 0.1
PACE_RATE = 0.1
RESOLUTION_SECONDS = 1e-5
"""Times that differ by less count as equal."""

Vector = list[float]


class OnlineFit:
    def __init__(self, prior: Sequence[float], memory: float, weight: float = PRIOR_WEIGHT) -> None:
        """`prior` has a positive coefficient for each feature, in seconds, and counts for `weight`
        measurements; after `memory` further measurements, one counts for a third."""
        size = len(prior)
        self._prior_weight = weight
        self._prior = list(prior)
        self._keep = math.exp(-1.0 / memory)
        self._pace = 0.0  # the logarithm of a factor on all coefficients
        self._spread = FIRST_SPREAD  # the usual error: log(measured / predicted)
        self._count = 0
        self._weight = 0.0
        # In units of the prior, summed over the measurements: products of two features, and of a
        # feature and the time.
        self._squares = [[0.0] * size for _ in range(size)]
        self._products = [0.0] * size
        self._shares = [1.0] * size

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds for a unit of each feature."""
        pace = math.exp(self._pace)
        return tuple(pace * a * b for a, b in zip(self._prior, self._shares, strict=True))

    def predict(self, features: Sequence[float]) -> float:
        return sum(a * b for a, b in zip(self.coefficients, features, strict=True))

    def note(self, features: Sequence[float], seconds: float) -> None:
        """Adds a measurement. Ignores seconds that are negative or not finite."""
        if not (math.isfinite(seconds) and seconds >= 0):
            return
        row = [a * b for a, b in zip(self._prior, features, strict=True)]
        shape = sum(a * b for a, b in zip(self._shares, row, strict=True))
        error = self._bounded(_error(seconds, shape * math.exp(self._pace)))
        self._count += 1
        self._pace += error * max(PACE_RATE, 1.0 / self._count)
        if shape > 0:
            self._add([each / shape for each in row], math.exp(error) if self._count > 1 else 1.0)
            self._shares = self._solve()

    def _bounded(self, error: float) -> float:
        """The error within its bounds. The first one sets the pace and is not bounded."""
        if not self._count:
            return error
        limit = OUTLIER * self._spread
        bounded = min(max(error, -limit), limit)
        self._spread += SPREAD_RATE * (abs(bounded) - self._spread)
        self._spread = max(self._spread, LEAST_SPREAD)
        return bounded

    def _add(self, row: Vector, value: float) -> None:
        """Adds the equation row · shares = value, in which the prediction is 1."""
        for i, left in enumerate(row):
            self._products[i] = self._keep * self._products[i] + left * value
            squares = self._squares[i]
            for j, right in enumerate(row):
                squares[j] = self._keep * squares[j] + left * right
        self._weight = self._keep * self._weight + 1.0

    def _solve(self) -> Vector:
        """Least squares with a ridge toward the prior; no share falls below the least."""
        size = len(self._prior)
        squares = [row.copy() for row in self._squares]
        products = self._products.copy()
        for i in range(size):
            ridge = self._prior_weight * squares[i][i] / self._weight
            squares[i][i] += ridge
            products[i] += ridge
        found = [1.0] * size
        free = [i for i in range(size) if self._squares[i][i] > LEAST_WEIGHT]
        while free:
            held = [i for i in range(size) if i not in free]
            rest = [products[i] - sum(squares[i][j] * found[j] for j in held) for i in free]
            solved = _solve_linear([[squares[i][j] for j in free] for i in free], rest)
            for i, value in zip(free, solved, strict=True):
                found[i] = max(value, LEAST_SHARE)
            low = [i for i, value in zip(free, solved, strict=True) if value < LEAST_SHARE]
            if not low:
                break
            free = [i for i in free if i not in low]
        return found


def _error(measured: float, predicted: float) -> float:
    return math.log((measured + RESOLUTION_SECONDS) / (predicted + RESOLUTION_SECONDS))


def _solve_linear(matrix: list[Vector], right: Vector) -> Vector:
    """Gaussian elimination in place, for a positive definite matrix of a few unknowns."""
    size = len(right)
    for i in range(size):
        for k in range(i + 1, size):
            factor = matrix[k][i] / matrix[i][i]
            right[k] -= factor * right[i]
            for j in range(i, size):
                matrix[k][j] -= factor * matrix[i][j]
    for i in reversed(range(size)):
        known = sum(matrix[i][j] * right[j] for j in range(i + 1, size))
        right[i] = (right[i] - known) / matrix[i][i]
    return right


class InterferenceShare:
    """Estimates how much longer decoding takes while prefill workers compute.

    On shared hardware, a step is sometimes delayed by a whole prompt, which a fit that bounds
    outliers would discard. So this sums the seconds by which steps were late, and the seconds of
    prefill compute beside them.
    """

    MEMORY_SECONDS = 60.0  # of prefill compute, after which a measurement counts for a third
    PRIOR_SECONDS = 1.0  # weight of the prior

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._busy = 0.0
        self._late = 0.0

    @property
    def share(self) -> float:
        """Seconds that a second of prefill compute costs a decoding request: 0 to 1."""
        late = self._late + self._prior * self.PRIOR_SECONDS
        return min(max(late / (self._busy + self.PRIOR_SECONDS), 0.0), 1.0)

    def note(self, busy_seconds: float, late_seconds: float) -> None:
        """Records that steps took `late_seconds` more beside `busy_seconds` of prefill compute."""
        if busy_seconds <= 0.0:
            return
        keep = math.exp(-busy_seconds / self.MEMORY_SECONDS)
        self._busy = keep * self._busy + busy_seconds
        self._late = keep * self._late + late_seconds

"""What a step costs by its number of rows, as measured.

A step reads all weights, and computes each row. So further rows cost little while a device waits
for memory, and nearly as much as the tokens they bring once it does not: on a CPU from the eighth
on. An online fit has the seconds of a step at some numbers of rows; between two of them cost is
linear. So what was measured with few rows says nothing of many, and the reverse. On a GPU, where
rows cost little, one line fits all.
"""

from __future__ import annotations

import bisect
import functools
from typing import NamedTuple

from baton.core.online_fit import OnlineFit


class Assumed(NamedTuple):
    """Seconds that are assumed until steps have been measured. Only their ratios matter."""

    step: float
    row: float
    wait: float
    rows: tuple[int, ...]  # numbers of rows whose cost is fitted
    weight: float  # steps that this counts for


CPU = Assumed(4e-3, 1e-3, 1e-3, (1, 2, 4, 8, 16, 32, 64, 128, 256), 2.0)
GPU = Assumed(5e-3, 2e-5, 1e-3, (1, 256), 0.2)
"""The second as an H200 has them with a model of 8B. It counts for little: while guesses are run,
few steps run ahead, and these alone tell a wait from the rest of a step."""

MEMORY = 200.0
"""Steps after which one counts for a third."""

FEW_ROWS = 4
"""That may be added to a step before any step had as many rows."""


class StepCost:
    def __init__(self, *, runs_ahead: bool = False) -> None:
        """`runs_ahead`: a device runs steps while the next are planned, unless it is made to
        wait."""
        assumed = GPU if runs_ahead else CPU
        self._rows = assumed.rows
        steps = [assumed.step + assumed.row * rows for rows in self._rows]
        self._set_fit(OnlineFit([*steps, assumed.wait], MEMORY, assumed.weight))
        self._most_measured = 0

    def _set_fit(self, fit: OnlineFit) -> None:
        self._fit = fit
        self._seconds = fit.coefficients  # by number of rows, and of a wait

    def seconds(self, rows: int, *, waited: bool = False) -> float:
        """Of a step, with those that the device waited for it."""
        seconds = sum(share * self._seconds[place] for place, share in _shares(rows, self._rows))
        return seconds + self._seconds[-1] if waited else seconds

    def note(self, rows: int, seconds: float, *, waited: bool = False) -> None:
        """Of a step that only decodes."""
        features = [0.0] * len(self._rows) + [float(waited)]
        for place, share in _shares(rows, self._rows):
            features[place] = share
        self._fit.note(features, seconds)
        self._set_fit(self._fit)
        self._most_measured = max(self._most_measured, rows)

    def most_rows(self, rows: int) -> int:
        """That a step of `rows` may have with guesses, so that cost is not predicted from far
        away."""
        return max(2 * self._most_measured, rows + FEW_ROWS)


@functools.cache
def _shares(rows: int, known: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    """The places of its neighbours in `known`, and their shares of the cost of a step."""
    above = bisect.bisect_left(known, rows)
    if above == len(known):
        return ((above - 1, rows / known[-1]),)
    if known[above] == rows:
        return ((above, 1.0),)
    share = (rows - known[above - 1]) / (known[above] - known[above - 1])
    return (above - 1, 1.0 - share), (above, share)

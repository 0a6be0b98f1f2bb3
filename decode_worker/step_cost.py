"""What a step costs by its number of rows, as measured.

A step reads all weights, and computes each row. So further rows cost little while a device waits
for memory, and nearly as much as the tokens they bring once it does not: on a CPU from the eighth
on. An online fit has the seconds of a step at some numbers of rows; between two of them cost is
linear. So what was measured with few rows says nothing of many, and the reverse.
"""

from __future__ import annotations

import bisect

from baton.core.online_fit import OnlineFit

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""The numbers of rows whose cost is fitted."""

STEP_SECONDS, CPU_ROW_SECONDS, GPU_ROW_SECONDS, WAIT_SECONDS = 4e-3, 1e-3, 2e-5, 4e-4
"""Assumed until steps have been measured; only their ratios matter."""

MEMORY = 200.0
"""Steps after which one counts for a third."""

FEW_ROWS = 4
"""That may be added to a step before any step had as many rows."""


class StepCost:
    def __init__(self, *, runs_ahead: bool = False) -> None:
        """`runs_ahead`: a device runs steps while the next are planned, unless it is made to
        wait."""
        row = GPU_ROW_SECONDS if runs_ahead else CPU_ROW_SECONDS
        steps = [STEP_SECONDS + row * rows for rows in ROWS]
        self._set_fit(OnlineFit([*steps, WAIT_SECONDS], MEMORY))
        self._most_measured = 0

    def _set_fit(self, fit: OnlineFit) -> None:
        self._fit = fit
        self._seconds = fit.coefficients  # by ROWS, and of a wait

    def seconds(self, rows: int, *, waited: bool = False) -> float:
        """Of a step, with those that the device waited for it."""
        seconds = sum(share * self._seconds[place] for place, share in _shares(rows))
        return seconds + self._seconds[-1] if waited else seconds

    def note(self, rows: int, seconds: float, *, waited: bool = False) -> None:
        """Of a step that only decodes."""
        features = [0.0] * len(ROWS) + [float(waited)]
        for place, share in _shares(rows):
            features[place] = share
        self._fit.note(features, seconds)
        self._set_fit(self._fit)
        self._most_measured = max(self._most_measured, rows)

    def most_rows(self, rows: int) -> int:
        """That a step of `rows` may have with guesses, so that cost is not predicted from far
        away."""
        return max(2 * self._most_measured, rows + FEW_ROWS)


def _shares(rows: int) -> tuple[tuple[int, float], ...]:
    """The neighbours in ROWS and their shares of the cost of a step."""
    above = bisect.bisect_left(ROWS, rows)
    if above == len(ROWS):
        return ((above - 1, rows / ROWS[-1]),)
    if ROWS[above] == rows:
        return ((above, 1.0),)
    share = (rows - ROWS[above - 1]) / (ROWS[above] - ROWS[above - 1])
    return (above - 1, 1.0 - share), (above, share)

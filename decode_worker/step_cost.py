"""The measured cost of a step by its number of rows.

A step reads all weights and computes each row. Further rows cost little while the step is bound by
memory, and nearly as much as the tokens they yield once it is bound by compute: on a CPU from the
eighth row on. An online fit has the seconds of a step at some numbers of rows; between these the
cost is linear. So a measurement with few rows does not change the cost of many, and the reverse. On
a GPU, where rows cost little, one line fits all.
"""

from __future__ import annotations

import bisect
import functools
from typing import NamedTuple

from baton.core.online_fit import OnlineFit


class Assumed(NamedTuple):
    """Seconds assumed until steps have been measured. Only their ratios matter."""

    step: float
    row: float
    wait: float
    rows: tuple[int, ...]  # numbers of rows whose cost is fitted
    weight: float  # number of measured steps that the assumption counts for
    block: int  # rows that are computed together
    records: bool  # the first step with a number of rows takes longer: it is recorded


CPU = Assumed(4e-3, 1e-3, 1e-3, (1, 2, 4, 8, 16, 32, 64, 128, 256), 2.0, 8, records=True)
GPU = Assumed(5e-3, 2e-5, 1e-3, (1, 256), 0.2, 1, records=False)
"""GPU is from an H200 with an 8B model. Its weight is low: while guesses are run, few steps run
ahead, and only these tell the wait from the rest of a step. Its steps are recorded at start."""

MEMORY = 200.0
"""Number of steps after which a measurement counts for a third."""

FEW_ROWS = 4
"""Rows that may be added to a step even if no step has had as many."""


class StepCost:
    def __init__(self, *, runs_ahead: bool = False) -> None:
        """`runs_ahead`: the device runs a step while the next one is planned, unless it has to wait
        for the plan."""
        assumed = GPU if runs_ahead else CPU
        self._rows, self.block = assumed.rows, assumed.block
        self._known: set[int] | None = set() if assumed.records else None
        steps = [assumed.step + assumed.row * rows for rows in self._rows]
        self._set_fit(OnlineFit([*steps, assumed.wait], MEMORY, assumed.weight))
        self._most_measured = 0

    def _set_fit(self, fit: OnlineFit) -> None:
        self._fit = fit
        self._seconds = fit.coefficients  # of a step, by number of rows; the last is of a wait

    def seconds(self, rows: int, *, waited: bool = False) -> float:
        """Predicts the seconds of a step; if `waited`, with the device's wait for it."""
        seconds = sum(share * self._seconds[place] for place, share in _shares(rows, self._rows))
        return seconds + self._seconds[-1] if waited else seconds

    def note(self, rows: int, seconds: float, *, waited: bool = False) -> None:
        """Notes the seconds of a step that only decodes."""
        self._most_measured = max(self._most_measured, rows)
        if self._known is not None and rows not in self._known:
            self._known.add(rows)
            return
        features = [0.0] * len(self._rows) + [float(waited)]
        for place, share in _shares(rows, self._rows):
            features[place] = share
        self._fit.note(features, seconds)
        self._set_fit(self._fit)

    def is_full(self, rows: int) -> bool:
        """True unless another row would cost next to nothing: it would fill a block."""
        return rows < self.block or rows % self.block == 0

    def most_rows(self, rows: int) -> int:
        """Limit of rows, with guesses, of a step that has `rows` without them, so that the cost is
        not extrapolated far."""
        return max(2 * self._most_measured, rows + FEW_ROWS)


@functools.cache
def _shares(rows: int, known: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    """The indices of the neighbours of `rows` in `known`, and their shares of the cost."""
    above = bisect.bisect_left(known, rows)
    if above == len(known):
        return ((above - 1, rows / known[-1]),)
    if known[above] == rows:
        return ((above, 1.0),)
    share = (rows - known[above - 1]) / (known[above] - known[above - 1])
    return (above - 1, 1.0 - share), (above, share)

"""How much longer decoding takes while prefill workers compute.

Where they share hardware, a step is now and then held up for as long as a prompt takes, which a
fit that bounds outliers takes for one. What matters is the sum: the seconds by which steps were
late, in proportion to the seconds of prefill workers that they ran beside.

Pure arithmetic: no I/O and no clock.
"""

from __future__ import annotations

import math

MEMORY_SECONDS = 60.0
"""Of prefill compute, after which a measurement counts for a third."""
PRIOR_SECONDS = 1.0
"""The prior counts as much as so many."""


class Disturbance:
    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._busy = 0.0
        self._late = 0.0

    @property
    def share(self) -> float:
        """Of a second of prefill compute, what it costs whoever is decoded: 0 to 1."""
        late = self._late + self._prior * PRIOR_SECONDS
        return min(max(late / (self._busy + PRIOR_SECONDS), 0.0), 1.0)

    def note(self, busy_seconds: float, late_seconds: float) -> None:
        """Steps beside so many seconds of prefill compute took so much longer than alone."""
        if busy_seconds <= 0.0:
            return
        keep = math.exp(-busy_seconds / MEMORY_SECONDS)
        self._busy = keep * self._busy + busy_seconds
        self._late = keep * self._late + late_seconds

"""Which share of the last seconds a worker's engine computed, from its own reports.

Both numbers of a report are of the worker's clock, so only differences between its own are
taken.
"""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 10.0
SPACING_SECONDS = 0.5
"""Between two reports that are remembered."""


class BusyShare:
    def __init__(self) -> None:
        self._reports: deque[tuple[float, float]] = deque()  # up and busy seconds

    def report(self, up_seconds: float, busy_seconds: float) -> None:
        reports = self._reports
        if len(reports) > 1 and up_seconds - reports[-2][0] < SPACING_SECONDS:
            reports.pop()
        reports.append((up_seconds, busy_seconds))
        while up_seconds - reports[0][0] > WINDOW_SECONDS and len(reports) > 2:
            reports.popleft()

    @property
    def share(self) -> float:
        """0 to 1; 0 before there is anything to tell."""
        if len(self._reports) < 2:
            return 0.0
        (began, busy_before), (ended, busy_after) = self._reports[0], self._reports[-1]
        if ended <= began:
            return 0.0
        return min(max((busy_after - busy_before) / (ended - began), 0.0), 1.0)

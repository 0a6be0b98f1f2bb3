"""The requests that wait for a worker with room: first come, first served.

A request that is tried again keeps the place of its arrival, and is not
refused: it has been let in already. No I/O and no clock.
"""

from __future__ import annotations

import bisect

from baton.core.errors import Exhausted

SHORTEST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0
# Of the time between two admissions, how much the latest one says.
LATEST_SHARE = 0.2


class Line:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: list[int] = []  # by order of arrival
        self._admitted_at: float | None = None
        self._interval = 0.0  # between two admissions, smoothed

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def head(self) -> int | None:
        return self._waiting[0] if self._waiting else None

    @property
    def retry_after(self) -> float:
        """Seconds in which those who wait now will probably be through."""
        expected = self._interval * len(self._waiting)
        return min(max(expected, SHORTEST_RETRY_SECONDS), LONGEST_RETRY_SECONDS)

    def join(self, order: int, *, again: bool = False) -> None:
        """Raises Exhausted when the line is full, unless the request was in it before."""
        if len(self._waiting) >= self._limit and not again:
            raise Exhausted(
                f"{len(self._waiting)} requests wait already; try again later",
                retry_after=self.retry_after,
            )
        bisect.insort(self._waiting, order)

    def leave(self, order: int) -> None:
        """Nothing changes when it was not in the line."""
        if order in self._waiting:
            self._waiting.remove(order)

    def admitted(self, now: float) -> None:
        """The head has found its workers."""
        if self._admitted_at is not None:
            self._interval += LATEST_SHARE * (now - self._admitted_at - self._interval)
        self._admitted_at = now

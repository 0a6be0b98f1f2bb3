"""Virtual time, the scheduler, and the trace."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable

Event = Callable[[], None]


class Violation(AssertionError):
    """Something happened that must never happen."""


class World:
    """Runs events in the order of their times. The seed decides everything else."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.bad_day = True
        self.events = 0
        self.counts: Counter[str] = Counter()  # what was seen
        self.trace: list[str] | None = [] if trace else None
        self.after_event: Event = lambda: None
        self._heap: list[tuple[float, int, Event]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now

    def after(self, seconds: float, event: Event) -> None:
        self.at(self.now + seconds, event)

    def at(self, time: float, event: Event) -> None:
        """Events of the same time happen in the order in which they were planned."""
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, event))

    def run(self, *, until: float) -> None:
        """Runs until nothing is left to happen; a world that goes on past `until` never rests."""
        while self._heap:
            self.now, _, event = heapq.heappop(self._heap)
            if self.now > until:
                raise Violation(f"the cluster has not come to rest after {until:g} seconds")
            self.events += 1
            event()
            self.after_event()

    def log(self, who: str, what: object) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:9.4f} {self.events:5} {who:8} {what}")

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def delay(self) -> float:
        """How long something takes: mostly little, on a bad day now and then long."""
        draw = self.random.random()
        if draw < 0.9 or not self.bad_day:
            return 0.0005 + 0.004 * draw
        return 0.05 + 2.5 * (draw - 0.9) * 10 if draw < 0.99 else 6.0

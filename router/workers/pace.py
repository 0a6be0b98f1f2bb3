"""How long a worker's steps take, seen from the messages that they send.

A decode worker sends a router one message a step, as long as it runs any of its
requests. Two that begin with the same request follow each other: the oldest
comes first, and gets a token with every step.
"""

from __future__ import annotations

from typing import NamedTuple

from baton.v1 import worker_pb2 as pb


class Stretch(NamedTuple):
    """Steps in a row."""

    steps: int
    # Of one, on average.
    seconds: float
    # How many prefill workers were at work meanwhile, on average.
    busy_prefill: float


class StepPace:
    def __init__(self) -> None:
        self._oldest = ""
        self._at = 0.0
        self._seconds = 0.0  # since this was asked last
        self._steps = 0
        self._asked = 0.0
        self._busy_seconds = 0.0  # of prefill workers, until then

    def step(self, step: pb.Step, now: float) -> None:
        if not step.tokens:
            return
        oldest = step.tokens[0].request_id
        if oldest == self._oldest:
            self._seconds += now - self._at
            self._steps += 1
        self._oldest, self._at = oldest, now

    def take(self, prefill_busy_seconds: float, now: float) -> Stretch | None:
        """The steps since this was asked last; None when there was none. Prefill workers have
        been busy for so long until now, summed over them."""
        busy, seconds = prefill_busy_seconds - self._busy_seconds, now - self._asked
        self._busy_seconds, self._asked = prefill_busy_seconds, now
        if not self._steps or seconds <= 0:
            return None
        stretch = Stretch(self._steps, self._seconds / self._steps, max(0.0, busy) / seconds)
        self._seconds, self._steps = 0.0, 0
        return stretch

"""How long a worker's steps take, seen from the messages that they send.

A decode worker sends a router one message a step, as long as it runs any of its
requests. Two that begin with the same request follow each other: the oldest
comes first, and gets a token with every step.
"""

from __future__ import annotations

from baton.v1 import worker_pb2 as pb


class StepPace:
    def __init__(self) -> None:
        self._oldest = ""
        self._at = 0.0
        self._seconds = 0.0  # since this was asked last
        self._steps = 0

    def step(self, step: pb.Step, now: float) -> None:
        if not step.tokens:
            return
        oldest = step.tokens[0].request_id
        if oldest == self._oldest:
            self._seconds += now - self._at
            self._steps += 1
        self._oldest, self._at = oldest, now

    def take(self) -> float | None:
        """The mean time of a step since this was asked last; None when there was none."""
        if not self._steps:
            return None
        mean = self._seconds / self._steps
        self._seconds, self._steps = 0.0, 0
        return mean

"""One reservation: the decode side of moving one attempt's pages.

                          landed
        ┌──────────┐                    ┌────────┐
        │ RESERVED │───────────────────▶│ LANDED │  the pages are the engine's
        └──────────┘                    └────────┘
          │      │
          │      │  drained, sender dead, undelivered, wrong number of pages
          │      └───────────────────────────────────────────────┐
          │ released, expired                                    ▼
          │      ┌─────────────┐  drained, landed, sender     ┌───────┐
          └─────▶│ QUARANTINED │─────────────────────────────▶│ FREED │
                 └─────────────┘  dead, undelivered, grace    └───────┘
                                  over

A sender may still write into a reservation that is not wanted any more, so its
pages are quarantined until one of these is sure:

- the sender says that nothing is under way (Drained), or that it is done (Landed)
- the sender is dead
- the ticket never reached it (undelivered)
- the ticket expired `grace_seconds` ago. A sender starts no write after expiry.
  The grace covers the ticket's way to the sender, whose time counts from its
  arrival, and the longest write that began in time.

The machine does no I/O and reads no clock. It says when pages may be freed; the
thread that owns the pool frees them.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from baton.v1.transfer_pb2 import Landed as LandedNote
from core.errors import BatonError, DeadlineExceeded, Internal, Unavailable, WorkerLost


class State(enum.Enum):
    RESERVED = enum.auto()
    LANDED = enum.auto()
    QUARANTINED = enum.auto()
    FREED = enum.auto()


class Step(enum.Enum):
    """What moves a reservation from one state to another."""

    LANDED = enum.auto()
    MISFIT = enum.auto()
    DRAINED = enum.auto()
    SENDER_DIED = enum.auto()
    EXPIRED = enum.auto()
    GRACE_OVER = enum.auto()
    RELEASED = enum.auto()
    UNDELIVERED = enum.auto()


TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.RESERVED, Step.LANDED): State.LANDED,
    (State.RESERVED, Step.MISFIT): State.FREED,
    (State.RESERVED, Step.DRAINED): State.FREED,
    (State.RESERVED, Step.SENDER_DIED): State.FREED,
    (State.RESERVED, Step.EXPIRED): State.QUARANTINED,
    (State.RESERVED, Step.RELEASED): State.QUARANTINED,
    (State.RESERVED, Step.UNDELIVERED): State.FREED,
    (State.QUARANTINED, Step.LANDED): State.FREED,
    (State.QUARANTINED, Step.MISFIT): State.FREED,
    (State.QUARANTINED, Step.DRAINED): State.FREED,
    (State.QUARANTINED, Step.SENDER_DIED): State.FREED,
    (State.QUARANTINED, Step.GRACE_OVER): State.FREED,
    (State.QUARANTINED, Step.RELEASED): State.QUARANTINED,
    (State.QUARANTINED, Step.UNDELIVERED): State.FREED,
}


@dataclass(frozen=True, slots=True)
class HandOver:
    """All pages are in place; they and token #1 go to the engine."""

    first_token: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Nothing usable will land."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class Free:
    """No write can reach the pages any more."""


Action = HandOver | Fail | Free


class Receiver:
    """The state of one reservation. Every input returns the actions it leads to."""

    def __init__(self, pages: int, expires_at: float, grace_seconds: float) -> None:
        self.state = State.RESERVED
        self._pages = pages
        self._expires_at = expires_at
        self._grace_over_at = expires_at + grace_seconds

    @property
    def over(self) -> bool:
        """Whether no input matters any more."""
        return self.state in (State.LANDED, State.FREED)

    @property
    def deadline(self) -> float:
        """When `tick` has something to do; infinity when never."""
        if self.state is State.RESERVED:
            return self._expires_at
        return self._grace_over_at if self.state is State.QUARANTINED else math.inf

    def landed(self, note: LandedNote) -> list[Action]:
        if note.pages != self._pages:
            message = f"{note.pages} pages landed where {self._pages} were reserved"
            return self._take(Step.MISFIT, Internal(message))
        if self.state is State.RESERVED:
            self._take(Step.LANDED)
            return [HandOver(note.first_token)]
        return self._take(Step.LANDED)

    def drained(self) -> list[Action]:
        return self._take(Step.DRAINED, Unavailable("the prefill worker gave the transfer up"))

    def sender_died(self) -> list[Action]:
        return self._take(Step.SENDER_DIED, WorkerLost("the prefill worker is lost"))

    def release(self, *, undelivered: bool) -> list[Action]:
        """The reservation is not wanted any more."""
        return self._take(Step.UNDELIVERED if undelivered else Step.RELEASED)

    def tick(self, now: float) -> list[Action]:
        if now < self.deadline:
            return []
        if self.state is State.RESERVED:
            error = DeadlineExceeded("the prompt's pages did not arrive before the ticket expired")
            return self._take(Step.EXPIRED, error)
        return self._take(Step.GRACE_OVER)

    def _take(self, step: Step, error: BatonError | None = None) -> list[Action]:
        """Moves; tells of `error` if it is news, and of pages that became free."""
        if self.over:
            return []
        before, self.state = self.state, TRANSITIONS[self.state, step]
        actions: list[Action] = []
        if error is not None and before is State.RESERVED:
            actions.append(Fail(error))
        if self.state is State.FREED:
            actions.append(Free())
        return actions

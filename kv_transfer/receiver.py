"""One reservation: the receiving side of moving one attempt's pages.

                     first beat                arrived, sound
        ┌──────────┐            ┌──────┐                      ┌─────────┐
        │ RESERVED │───────────▶│ OPEN │─────────────────────▶│ ARRIVED │  the pages are
        └──────────┘            └──────┘                      └─────────┘  the engine's
             │                   │    │
             │ released,         │    │ released, expired, sender silent, damaged
             │ expired           │    ▼        too often
             │                   │  ┌─────────────┐
             │                   │  │ QUARANTINED │
             │                   │  └─────────────┘
             ▼                   ▼    ▼
        ┌──────────────────────────────────────┐
        │ FREED: drained, sender dead, misfit  │
        └──────────────────────────────────────┘

A sender writes only under a lease, which it asks for with a beat. Until one has
come, the pages are untouched and can be freed at once. From then on the sender
may be writing, so pages that are not wanted any more are quarantined until one
of these is sure:

- the sender says that nothing is under way (Drained), or that it is done (Arrived)
- the sender is dead, or cut off in such a way that none of its writes arrives

No time is long enough to prove either: a frozen sender may thaw. In quarantine
the sender is told again and again that its lease is revoked, which finds out
both: a live one answers Drained, and a dead one cannot be reached.

A reservation for a prompt is filled as a whole. One for pages that are fetched from
a cache may be `partial`: what the holder does not have stays empty.

The machine does no I/O and reads no clock. It says when pages may be freed; the
thread that owns the pool frees them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import BatonError, DeadlineExceeded, Internal, Unavailable, WorkerLost
from baton.core.types import AttemptKey
from baton.kv_transfer.notes import accepted_note, renewed_note, resend_note, revoked_note
from baton.v1.transfer_pb2 import Arrived as ArrivedNote

REVOKES_PER_LEASE = 5
MAX_ROUNDS = 3
"""How often damaged pages are asked for again."""


class ReceiverState(enum.Enum):
    RESERVED = enum.auto()
    OPEN = enum.auto()
    ARRIVED = enum.auto()
    QUARANTINED = enum.auto()
    FREED = enum.auto()


class ReceiverStep(enum.Enum):
    """What moves a reservation from one state to another."""

    BEAT = enum.auto()
    ARRIVED = enum.auto()
    MISFIT = enum.auto()
    DAMAGED = enum.auto()
    DRAINED = enum.auto()
    SENDER_DIED = enum.auto()
    SILENT = enum.auto()
    EXPIRED = enum.auto()
    RELEASED = enum.auto()


TRANSITIONS: dict[tuple[ReceiverState, ReceiverStep], ReceiverState] = {
    (ReceiverState.RESERVED, ReceiverStep.BEAT): ReceiverState.OPEN,
    (ReceiverState.RESERVED, ReceiverStep.MISFIT): ReceiverState.FREED,
    (ReceiverState.RESERVED, ReceiverStep.DRAINED): ReceiverState.FREED,
    (ReceiverState.RESERVED, ReceiverStep.SENDER_DIED): ReceiverState.FREED,
    (ReceiverState.RESERVED, ReceiverStep.EXPIRED): ReceiverState.FREED,
    (ReceiverState.RESERVED, ReceiverStep.RELEASED): ReceiverState.FREED,
    (ReceiverState.OPEN, ReceiverStep.BEAT): ReceiverState.OPEN,
    (ReceiverState.OPEN, ReceiverStep.ARRIVED): ReceiverState.ARRIVED,
    (ReceiverState.OPEN, ReceiverStep.MISFIT): ReceiverState.FREED,
    (ReceiverState.OPEN, ReceiverStep.DAMAGED): ReceiverState.QUARANTINED,
    (ReceiverState.OPEN, ReceiverStep.DRAINED): ReceiverState.FREED,
    (ReceiverState.OPEN, ReceiverStep.SENDER_DIED): ReceiverState.FREED,
    (ReceiverState.OPEN, ReceiverStep.SILENT): ReceiverState.QUARANTINED,
    (ReceiverState.OPEN, ReceiverStep.EXPIRED): ReceiverState.QUARANTINED,
    (ReceiverState.OPEN, ReceiverStep.RELEASED): ReceiverState.QUARANTINED,
    (ReceiverState.QUARANTINED, ReceiverStep.BEAT): ReceiverState.QUARANTINED,
    (ReceiverState.QUARANTINED, ReceiverStep.ARRIVED): ReceiverState.FREED,
    (ReceiverState.QUARANTINED, ReceiverStep.MISFIT): ReceiverState.FREED,
    (ReceiverState.QUARANTINED, ReceiverStep.DRAINED): ReceiverState.FREED,
    (ReceiverState.QUARANTINED, ReceiverStep.SENDER_DIED): ReceiverState.FREED,
    (ReceiverState.QUARANTINED, ReceiverStep.RELEASED): ReceiverState.QUARANTINED,
}


@dataclass(frozen=True, slots=True)
class SendNote:
    """Send a note to the sender. No answer is wanted."""

    note: bytes


@dataclass(frozen=True, slots=True)
class HandOver:
    """So many pages, counted from the first, are in place; they and token #1 go to the engine."""

    first_token: int
    pages: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Nothing usable will land. Without an error, the sender gave up and says why."""

    error: BatonError | None


@dataclass(frozen=True, slots=True)
class Free:
    """No write can reach the pages any more."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """The sender has been told for a while that the pages are not wanted, and has not answered."""


Action = SendNote | HandOver | Fail | Free | Overdue


class Receiver:
    """The state of one reservation. Every input returns the actions it leads to."""

    def __init__(
        self,
        key: AttemptKey,
        pages: int,
        expires_at: float,
        lease_seconds: float,
        *,
        partial: bool = False,
    ) -> None:
        self.state = ReceiverState.RESERVED
        self._key = key
        self._pages = pages
        self._fewest = 1 if partial else pages
        self._expires_at = expires_at
        self._lease_seconds = lease_seconds
        self._silent_at = math.inf  # when the sender has been silent for too long
        self._revoke_at = math.inf
        self._overdue = False  # it was said that the sender takes its time
        self.round = 0  # how often damaged pages were asked for again
        self._damaged: Sequence[int] = ()  # the pages of the last such round

    @property
    def over(self) -> bool:
        """Whether no input matters any more."""
        return self.state in (ReceiverState.ARRIVED, ReceiverState.FREED)

    @property
    def deadline(self) -> float:
        """When `tick` has something to do; infinity when never."""
        match self.state:
            case ReceiverState.RESERVED:
                return self._expires_at
            case ReceiverState.OPEN:
                return min(self._expires_at, self._silent_at)
            case ReceiverState.QUARANTINED:
                return self._revoke_at
            case _:
                return math.inf

    def beat(self, number: int, now: float) -> list[Action]:
        """The sender is alive and wants a lease, or wants it renewed."""
        if self.over:
            return []
        self._take(ReceiverStep.BEAT)
        if self.state is ReceiverState.QUARANTINED:
            return [SendNote(revoked_note(self._key))]
        self._silent_at = now + self._lease_seconds
        return [SendNote(renewed_note(self._key, number))]

    def arrived(self, note: ArrivedNote, damaged: Sequence[int], now: float) -> list[Action]:
        """The sender says that all pages are in place; those in `damaged` are not what it sent."""
        if self.over:
            return []
        if note.round != self.round:
            # Damaged pages are being written again, or the order to do so was lost.
            return [self._resend()] if self.state is ReceiverState.OPEN else []
        if self.state is ReceiverState.RESERVED:
            return self._take(ReceiverStep.MISFIT, Internal("pages arrived that no lease allowed"))
        if not self._fewest <= note.pages <= self._pages:
            message = f"{note.pages} pages arrived where {self._pages} were reserved"
            return self._take(ReceiverStep.MISFIT, Internal(message))
        if self.state is ReceiverState.OPEN and damaged:
            return self._ask_again(damaged, now)
        self._take(ReceiverStep.ARRIVED)
        if self.state is ReceiverState.ARRIVED:
            return [SendNote(accepted_note(self._key)), HandOver(note.first_token, note.pages)]
        return [SendNote(revoked_note(self._key)), Free()]

    def drained(self) -> list[Action]:
        wanted = self.state in (ReceiverState.RESERVED, ReceiverState.OPEN)
        return [*([Fail(None)] if wanted else []), *self._take(ReceiverStep.DRAINED)]

    def sender_died(self) -> list[Action]:
        return self._take(ReceiverStep.SENDER_DIED, WorkerLost("the sending worker is lost"))

    def release(self, now: float) -> list[Action]:
        """The reservation is not wanted any more."""
        return self._take(ReceiverStep.RELEASED) + self._revoke(now)

    def tick(self, now: float) -> list[Action]:
        if now < self.deadline:
            return []
        if self.state is ReceiverState.QUARANTINED:
            overdue, self._overdue = not self._overdue, True
            return [*([Overdue()] if overdue else []), *self._revoke(now)]
        if now >= self._expires_at:
            error = DeadlineExceeded("the pages did not arrive before the ticket expired")
            return self._take(ReceiverStep.EXPIRED, error) + self._revoke(now)
        silence = f"the sending worker has been silent for {self._lease_seconds:g} s"
        return self._take(ReceiverStep.SILENT, Unavailable(silence)) + self._revoke(now)

    def _ask_again(self, damaged: Sequence[int], now: float) -> list[Action]:
        if self.round == MAX_ROUNDS:
            error = Unavailable(f"pages were damaged on their way {MAX_ROUNDS + 1} times")
            return self._take(ReceiverStep.DAMAGED, error) + self._revoke(now)
        self.round += 1
        self._damaged = damaged
        return [self._resend()]

    def _resend(self) -> Action:
        return SendNote(resend_note(self._key, self._damaged, self.round))

    def _revoke(self, now: float) -> list[Action]:
        if self.state is not ReceiverState.QUARANTINED:
            return []
        self._revoke_at = now + self._lease_seconds / REVOKES_PER_LEASE
        return [SendNote(revoked_note(self._key))]

    def _take(self, step: ReceiverStep, error: BatonError | None = None) -> list[Action]:
        """Moves; tells of `error` if it is news, and of pages that became free."""
        if self.over:
            return []
        before, self.state = self.state, TRANSITIONS[self.state, step]
        actions: list[Action] = []
        if error is not None and before is not ReceiverState.QUARANTINED:
            actions.append(Fail(error))
        if self.state is ReceiverState.FREED:
            actions.append(Free())
        return actions

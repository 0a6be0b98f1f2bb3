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

A sender writes only under a lease, which it requests with a beat. Before the first
beat the pages are untouched and can be freed at once. From then on the sender may
be writing, so unwanted pages are quarantined until one of these is certain:

- the sender reports that no write is under way (Drained), or that all are done (Arrived)
- the sender is dead, or cut off so that none of its writes can arrive

No timeout proves either: a frozen sender may thaw. In quarantine Revoked is sent
repeatedly, which proves one or the other: a live sender answers Drained, and a
dead one cannot be reached.

A prompt's reservation is filled as a whole. A fetch may be filled in part, with
what the holder has cached.

The machine does no I/O and reads no clock. It reports when pages may be freed; the
thread that owns the pool frees them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

from baton.core.errors import BatonError, DeadlineExceeded, Internal, Unavailable, WorkerLost
from baton.core.types import AttemptKey
from baton.kv_transfer.transfer_events import (
    Arrived,
    Fetched,
    ReservationFailed,
    ReservationFreed,
    ReservationOverdue,
)
from baton.kv_transfer.transfer_protocol import (
    SendNote,
    accepted_note,
    pack_note,
    revoked_note,
)
from baton.v1.transfer_pb2 import Arrived as ArrivedNote
from baton.v1.transfer_pb2 import Renewed, Resend, TransferNote

REVOKES_PER_LEASE = 5
MAX_ROUNDS = 3
"""How many times damaged pages are requested again."""


class ReceiverState(enum.Enum):
    RESERVED = enum.auto()
    OPEN = enum.auto()
    ARRIVED = enum.auto()
    QUARANTINED = enum.auto()
    FREED = enum.auto()


class ReceiverStep(enum.Enum):
    """An input that moves a reservation to another state."""

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


ReceiverAction = (
    SendNote | Arrived | Fetched | ReservationFailed | ReservationFreed | ReservationOverdue
)


class Receiver:
    """The state of one reservation. Every input returns the actions it leads to."""

    def __init__(
        self,
        key: AttemptKey,
        peer: str,
        pages: Sequence[int],
        expires_at: float,
        lease_seconds: float,
        fetched_since: float | None = None,
    ) -> None:
        """The agent `peer` may write to `pages`. `fetched_since` is when a fetch was requested;
        None for a prompt's reservation."""
        self.state = ReceiverState.RESERVED
        self.key = key
        self.peer = peer
        self.pages = tuple(pages)
        self._fetched_since = fetched_since
        self._expires_at = expires_at
        self._lease_seconds = lease_seconds
        self._silent_at = math.inf  # when the sender has been silent for a lease
        self._revoke_at = math.inf
        self._linger_until = math.inf  # when a dead sender's last writes will have ended
        self._overdue = False  # ReservationOverdue was reported
        self.round = 0  # how often damaged pages were requested again
        self._damaged: Sequence[int] = ()  # their positions in the last round

    @property
    def over(self) -> bool:
        """True if further inputs change nothing."""
        return self.state in (ReceiverState.ARRIVED, ReceiverState.FREED)

    @property
    def deadline(self) -> float:
        """When `tick` has something to do; infinity when never."""
        match self.state:
            case ReceiverState.RESERVED:
                return self._expires_at
            case ReceiverState.OPEN:
                return min(self._expires_at, self._silent_at, self._linger_until)
            case ReceiverState.QUARANTINED:
                return min(self._revoke_at, self._linger_until)
            case _:
                return math.inf

    def beat(self, number: int, now: float) -> list[ReceiverAction]:
        """The sender is alive and requests a lease or its renewal."""
        if self.over:
            return []
        self._move(ReceiverStep.BEAT)
        if self.state is ReceiverState.QUARANTINED:
            return [SendNote(revoked_note(self.key))]
        self._silent_at = now + self._lease_seconds
        renewed = TransferNote(renewed=Renewed(number=number))
        return [SendNote(pack_note(self.key, renewed))]

    def arrived(
        self, note: ArrivedNote, damaged: Sequence[int], now: float
    ) -> list[ReceiverAction]:
        """The sender has written all pages; those at positions `damaged` arrived damaged."""
        if self.over:
            return []
        if note.round != self.round:
            # Damaged pages are being written again, or the Resend was lost.
            return [self._resend()] if self.state is ReceiverState.OPEN else []
        if self.state is ReceiverState.RESERVED:
            return self._move(ReceiverStep.MISFIT, Internal("pages arrived without a lease"))
        most = len(self.pages)
        fewest = most if self._fetched_since is None else 1
        if not fewest <= note.pages <= most:
            message = f"{note.pages} pages arrived where {most} were reserved"
            return self._move(ReceiverStep.MISFIT, Internal(message))
        if self.state is ReceiverState.OPEN and damaged:
            return self._ask_again(damaged, now)
        self._move(ReceiverStep.ARRIVED)
        if self.state is ReceiverState.ARRIVED:
            return [SendNote(accepted_note(self.key)), self._arrival(note, now)]
        return [SendNote(revoked_note(self.key)), ReservationFreed(self.key)]

    def drained(self) -> list[ReceiverAction]:
        wanted = self.state in (ReceiverState.RESERVED, ReceiverState.OPEN)
        return [
            *([ReservationFailed(self.key, None)] if wanted else []),
            *self._move(ReceiverStep.DRAINED),
        ]

    def sender_died(self) -> list[ReceiverAction]:
        return self._move(ReceiverStep.SENDER_DIED, WorkerLost("the sending worker is lost"))

    def linger(self, until: float) -> list[ReceiverAction]:
        """The sender's process has ended; bytes that it sent may arrive until `until`."""
        if self.state is ReceiverState.RESERVED:
            return self.sender_died()
        self._linger_until = min(self._linger_until, until)
        return []

    def release(self, now: float) -> list[ReceiverAction]:
        """The reservation is not wanted any more."""
        return self._move(ReceiverStep.RELEASED) + self._revoke(now)

    def tick(self, now: float) -> list[ReceiverAction]:
        if now < self.deadline:
            return []
        if now >= self._linger_until:
            return self.sender_died()
        if self.state is ReceiverState.QUARANTINED:
            overdue, self._overdue = not self._overdue, True
            return [*([ReservationOverdue(self.key)] if overdue else []), *self._revoke(now)]
        if now >= self._expires_at:
            error = DeadlineExceeded("the pages did not arrive before the ticket expired")
            return self._move(ReceiverStep.EXPIRED, error) + self._revoke(now)
        silence = f"the sending worker has been silent for {self._lease_seconds:g} s"
        return self._move(ReceiverStep.SILENT, Unavailable(silence)) + self._revoke(now)

    def _arrival(self, note: ArrivedNote, now: float) -> ReceiverAction:
        if self._fetched_since is None:
            return Arrived(self.key, note.first_token)
        return Fetched(self.key, note.pages, now - self._fetched_since)

    def _ask_again(self, damaged: Sequence[int], now: float) -> list[ReceiverAction]:
        if self.round == MAX_ROUNDS:
            error = Unavailable(f"pages arrived damaged {MAX_ROUNDS + 1} times")
            return self._move(ReceiverStep.DAMAGED, error) + self._revoke(now)
        self.round += 1
        self._damaged = damaged
        return [self._resend()]

    def _resend(self) -> ReceiverAction:
        resend = Resend(positions=self._damaged, round=self.round)
        return SendNote(pack_note(self.key, TransferNote(resend=resend)))

    def _revoke(self, now: float) -> list[ReceiverAction]:
        if self.state is not ReceiverState.QUARANTINED:
            return []
        self._revoke_at = now + self._lease_seconds / REVOKES_PER_LEASE
        return [SendNote(revoked_note(self.key))]

    def _move(self, step: ReceiverStep, error: BatonError | None = None) -> list[ReceiverAction]:
        """Changes the state; reports a first error, and pages that became free."""
        if self.over:
            return []
        before, self.state = self.state, TRANSITIONS[self.state, step]
        actions: list[ReceiverAction] = []
        if error is not None and before is not ReceiverState.QUARANTINED:
            actions.append(ReservationFailed(self.key, error))
        if self.state is ReceiverState.FREED:
            actions.append(ReservationFreed(self.key))
        return actions

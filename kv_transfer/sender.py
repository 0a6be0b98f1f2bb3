"""One push: the sending side of moving one attempt's pages.

                 ticket            first lease           all pages and token #1
    ┌─────────┐        ┌────────┐             ┌─────────┐            ┌───────────┐
    │ WAITING │───────▶│ ASKING │────────────▶│ PUSHING │───────────▶│ FINISHING │
    └─────────┘        └────────┘             └─────────┘            └───────────┘
         │                 │                       │         resend ▲ │   │ last write
         │                 │                       │                │ ▼   │ done
         │                 │                       │          ┌────────────┐
         │                 │                       │          │ CONFIRMING │
         ▼                 ▼                       ▼          └────────────┘
    ┌──────────────────────────────────────────────────┐            │  │ accepted
    │ DRAINING: cancelled, failed, revoked, expired,   │◀───────────┘  ▼
    │           lease lapsed or peer lost              │           ┌──────┐
    └──────────────────────────────────────────────────┘──────────▶│ DONE │
                                   no write under way              └──────┘

A ticket alone allows no write. The sender sends a beat, the receiver answers it,
and the sender then holds a lease that counts from the time of the beat. Writes start
only under a lease. So a receiver that never answered knows that its pages are
untouched, and one that stops answering knows that soon no further write starts.
Beats continue as long as the push does, and show the receiver that the sender is
alive.

Pages may become ready in any state. Those that the ticket says the receiver already
holds are dropped. One write is in flight at a time: pages that become ready
meanwhile go into the next one, so writes are few and large, and the write that
carries the Arrived note starts only when all earlier bytes are in place. When
token #1 comes after the last page's write has started, the note is sent alone.
Arrived is repeated until the receiver has accepted the pages or asked for damaged
ones again.

A fetch is a push too, from the decode worker that holds the pages: all of them are
ready from the start, and token #1 is unused.

A failed push sends Drained once no write is under way, even without a ticket, which
may be on its way. Its pages may be freed only at PushEnded.

The machine does no I/O and reads no clock: inputs carry the time and return
actions.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Internal,
    Unavailable,
    WorkerLost,
)
from baton.core.types import AttemptKey, DeviceEvent
from baton.kv_transfer.transfer_events import PushEnded, PushFailed, PushOverdue
from baton.kv_transfer.transfer_protocol import (
    SendNote,
    WriteLease,
    drained_note,
    pack_note,
)
from baton.kv_transfer.transport import PageWrite
from baton.v1.transfer_pb2 import Arrived, Beat, Resend, TicketBody, TransferNote

Digest = Callable[[Sequence[int]], list[int]]
"""Returns digests of local pages as the receiver will compute them; empty if it cannot."""

MAX_WRITE_BYTES = 1 << 30
"""On CPU memory the transfer thread copies the bytes itself: a longer write would delay beats."""


class SenderState(enum.Enum):
    WAITING = enum.auto()
    ASKING = enum.auto()
    PUSHING = enum.auto()
    FINISHING = enum.auto()
    CONFIRMING = enum.auto()
    DRAINING = enum.auto()
    DONE = enum.auto()


class SenderStep(enum.Enum):
    """An input that moves a push to another state."""

    TICKET = enum.auto()
    LEASE = enum.auto()
    LAST_WRITE = enum.auto()
    WRITTEN = enum.auto()
    RESEND = enum.auto()
    ACCEPTED = enum.auto()
    GIVE_UP = enum.auto()
    DRAINED = enum.auto()


TRANSITIONS: dict[tuple[SenderState, SenderStep], SenderState] = {
    (SenderState.WAITING, SenderStep.TICKET): SenderState.ASKING,
    (SenderState.WAITING, SenderStep.GIVE_UP): SenderState.DRAINING,
    (SenderState.ASKING, SenderStep.LEASE): SenderState.PUSHING,
    (SenderState.ASKING, SenderStep.GIVE_UP): SenderState.DRAINING,
    (SenderState.PUSHING, SenderStep.LAST_WRITE): SenderState.FINISHING,
    (SenderState.PUSHING, SenderStep.GIVE_UP): SenderState.DRAINING,
    (SenderState.FINISHING, SenderStep.WRITTEN): SenderState.CONFIRMING,
    (SenderState.FINISHING, SenderStep.GIVE_UP): SenderState.DRAINING,
    (SenderState.CONFIRMING, SenderStep.RESEND): SenderState.FINISHING,
    (SenderState.CONFIRMING, SenderStep.ACCEPTED): SenderState.DONE,
    (SenderState.CONFIRMING, SenderStep.GIVE_UP): SenderState.DRAINING,
    (SenderState.DRAINING, SenderStep.DRAINED): SenderState.DONE,
}

_BEATING = (SenderState.ASKING, SenderState.PUSHING, SenderState.FINISHING, SenderState.CONFIRMING)


@dataclass(frozen=True, slots=True)
class Introduce:
    """Send the receiver our address again."""


@dataclass(frozen=True, slots=True)
class PeerSilent:
    """The receiver has not answered for a lease: no push to it can succeed now."""

    error: BatonError


SenderAction = PageWrite | SendNote | Introduce | PeerSilent | PushFailed | PushOverdue | PushEnded


class Sender:
    """The state of one push. Every input returns the actions it leads to."""

    def __init__(
        self, key: AttemptKey, peer: str, page_bytes: int, digest: Digest | None = None
    ) -> None:
        self.state = SenderState.WAITING
        self.peer = peer
        self.key = key
        self._page_bytes = page_bytes
        self._digest = digest
        self._pages: list[int] = []  # local ones to write, in the prompt's order
        self._to_drop = 0  # how many of the next pages the receiver already holds
        self._digests: list[int] = []  # of the pages whose write has started, or empty
        self._after: DeviceEvent | None = None  # all of `_pages` are complete after it
        self._started = 0  # pages written or being written
        self._remote_pages: Sequence[int] = ()
        self._first_token: int | None = None
        self._round = 0  # how often damaged pages were sent again
        self._accepted = False
        self._resend: Resend | None = None  # came before the last write was done
        self._lease = WriteLease()
        self._expires_at = math.inf
        self._finished_at = self._written_at = math.inf
        self._writing: PageWrite | None = None
        self._write_began = 0.0
        self._peer_lost = False
        self._error: BatonError | None = None
        self._bytes = 0
        self._seconds = 0.0

    @property
    def deadline(self) -> float:
        """When `tick` has something to do; infinity when never."""
        if self.state is SenderState.DRAINING:
            return self._lease.next_beat
        if self.state not in _BEATING or self._accepted:
            return math.inf
        expires_at = self._expires_at if self.state is SenderState.PUSHING else math.inf
        return min(self._lease.next_beat, self._lease.until, expires_at)

    @property
    def expects(self) -> bool:
        """True while an answer is expected soon: the transport is then polled often."""
        return self._writing is not None or self.state in (
            SenderState.ASKING,
            SenderState.CONFIRMING,
        )

    def ticket(self, body: TicketBody, now: float) -> list[SenderAction]:
        """The ticket came. Its expiry counts from now, since clocks differ."""
        if self.state is not SenderState.WAITING:
            return []
        if AttemptKey(body.request_id, body.epoch) != self.key:
            return self.fail(Internal("the ticket is for another attempt"))
        if body.agent != self.peer:
            return self.fail(Internal("the ticket is another worker's"))
        self._move(SenderStep.TICKET)
        self._remote_pages = tuple(body.pages)
        self._to_drop = body.held_pages
        self._pages = self._without_held(self._pages)
        self._expires_at = now + body.expires_after_seconds
        self._lease = WriteLease(body.lease_seconds, until=now + body.lease_seconds)
        return self._beat(now)

    def pages_ready(
        self, pages: Sequence[int], now: float, after: DeviceEvent | None = None
    ) -> list[SenderAction]:
        """More local pages are complete, or will be after `after`, as all earlier ones will."""
        self._pages += self._without_held(pages)
        self._after = after or self._after
        return self._advance(now)

    def finish(
        self, first_token: int, pages: Sequence[int], finished_at: float, now: float
    ) -> list[SenderAction]:
        """`pages` are the last ones; compute ended at `finished_at`."""
        self._first_token = first_token
        self._finished_at = finished_at
        return self.pages_ready(pages, now)

    def renewed(self, number: int, now: float) -> list[SenderAction]:
        """The receiver answered a beat."""
        if self.state not in _BEATING or not self._lease.renew(number):
            return []
        if self.state is SenderState.ASKING:
            self._move(SenderStep.LEASE)
        return self._advance(now)

    def revoked(self) -> list[SenderAction]:
        if self._accepted:
            return []
        return self.fail(Unavailable("the receiving worker has revoked the lease"))

    def resend(self, resend: Resend, now: float) -> list[SenderAction]:
        """Pages arrived damaged. A repeated note is dropped."""
        if resend.round != self._round + 1:
            return []
        if self.state is SenderState.FINISHING:
            self._resend = resend
        if self.state is not SenderState.CONFIRMING:
            return []
        if now >= self._lease.until:
            return self.tick(now)
        if not all(position < len(self._pages) for position in resend.positions):
            return self.fail(Internal("the receiving worker asks for pages that were not sent"))
        self._move(SenderStep.RESEND)
        self._round, self._resend = resend.round, None
        return [self._start_write(resend.positions, self._arrived_note(), now)]

    def accepted(self) -> list[SenderAction]:
        """All pages arrived undamaged."""
        self._accepted = True
        return self._end() if self.state is SenderState.CONFIRMING else []

    def write_done(self, now: float) -> list[SenderAction]:
        self._bytes += self._page_bytes * len(self._end_write(now).local_pages)
        if self.state is SenderState.DRAINING:
            return self._drain()
        if self.state is not SenderState.FINISHING:
            return self._advance(now)
        self._move(SenderStep.WRITTEN)
        self._written_at = now
        if self._accepted:
            return self._end()
        return self.resend(self._resend, now) if self._resend else []

    def write_failed(self, error: BatonError, now: float) -> list[SenderAction]:
        self._end_write(now)
        return self._drain() if self.state is SenderState.DRAINING else self.fail(error)

    def cancel(self) -> list[SenderAction]:
        return self.fail(Cancelled("the request was cancelled"))

    def peer_lost(self) -> list[SenderAction]:
        """The receiver is lost. A write under way still ends with write_failed."""
        self._peer_lost = True
        return self.fail(WorkerLost(f"the receiving worker's agent {self.peer} is lost"))

    def tick(self, now: float) -> list[SenderAction]:
        if now < self.deadline:
            return []
        if self.state is SenderState.DRAINING:
            self._lease.next_beat = math.inf
            return [PushOverdue(self.key)]
        if now >= self._lease.until:
            seconds = self._lease.seconds
            error = Unavailable(f"the receiving worker has been silent for {seconds:g} s")
            return [PeerSilent(error), *self.fail(error)]
        if self.state is SenderState.PUSHING and now >= self._expires_at:
            return self.fail(DeadlineExceeded("the ticket expired before all pages were sent"))
        return self._beat(now)

    def fail(self, error: BatonError) -> list[SenderAction]:
        """Ends the push. Only the first error is reported."""
        if self.state in (SenderState.DRAINING, SenderState.DONE):
            return []
        self._move(SenderStep.GIVE_UP)
        self._error = error
        return [PushFailed(self.key, error)] if self._writing is not None else self._drain()

    def _move(self, step: SenderStep) -> None:
        self.state = TRANSITIONS[self.state, step]

    def _beat(self, now: float) -> list[SenderAction]:
        actions: list[SenderAction] = []
        if self.state is SenderState.ASKING and self._lease.beats:
            actions.append(Introduce())  # the last beat went unanswered
        if self.state is SenderState.CONFIRMING:
            actions.append(SendNote(self._arrived_note()))
        beat = TransferNote(beat=Beat(number=self._lease.beat(now)))
        return [*actions, SendNote(pack_note(self.key, beat))]

    def _advance(self, now: float) -> list[SenderAction]:
        """Starts the next write when pages are ready and no write is under way."""
        if self.state is not SenderState.PUSHING or self._writing is not None:
            return []
        if now >= min(self._lease.until, self._expires_at):
            return self.tick(now)
        if misfit := self._misfit():
            return self.fail(Internal(misfit))
        most = max(MAX_WRITE_BYTES // self._page_bytes, 1)
        new = range(self._started, min(len(self._pages), self._started + most))
        if self._digest is not None:
            self._digests += self._digest(self._pages[new.start : new.stop])
        note = b""
        if self._first_token is not None and new.stop == len(self._pages):
            self._move(SenderStep.LAST_WRITE)
            note = self._arrived_note()
        elif not new:
            return []
        self._started = new.stop
        return [self._start_write(new, note, now)]

    def _without_held(self, pages: Sequence[int]) -> list[int]:
        dropped = min(self._to_drop, len(pages))
        self._to_drop -= dropped
        return list(pages[dropped:])

    def _misfit(self) -> str:
        """Why the pages cannot fill the reservation; empty when they can."""
        ready, reserved = len(self._pages), len(self._remote_pages)
        finished = self._first_token is not None
        if ready > reserved or (finished and ready < reserved):
            return f"{ready} pages were made for {reserved} reserved ones"
        return ""

    def _arrived_note(self) -> bytes:
        """The note that every page is in place, after `_round` rounds of resending."""
        arrived = Arrived(
            first_token=self._first_token or 0,
            pages=len(self._pages),
            digests=self._digests,
            round=self._round,
        )
        return pack_note(self.key, TransferNote(arrived=arrived))

    def _start_write(self, positions: Sequence[int], note: bytes, now: float) -> PageWrite:
        self._write_began = now
        local = tuple(self._pages[position] for position in positions)
        remote = tuple(self._remote_pages[position] for position in positions)
        self._writing = PageWrite(self.peer, local, remote, note, self._after)
        return self._writing

    def _end_write(self, now: float) -> PageWrite:
        if self._writing is None:
            raise Internal("a write ended that was not under way")
        ended, self._writing = self._writing, None
        self._seconds += now - self._write_began
        return ended

    def _end(self) -> list[SenderAction]:
        self._move(SenderStep.ACCEPTED)
        exposed = self._written_at - self._finished_at
        return [PushEnded(self.key, None, self._bytes, self._seconds, exposed)]

    def _drain(self) -> list[SenderAction]:
        self._move(SenderStep.DRAINED)
        ended = PushEnded(self.key, self._error, self._bytes, self._seconds, 0.0)
        return [ended] if self._peer_lost else [SendNote(drained_note(self.key)), ended]

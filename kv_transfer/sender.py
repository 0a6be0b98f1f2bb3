"""One push: the prefill side of moving one attempt's pages.

                     ticket                  all pages and token #1 known
        ┌─────────┐          ┌─────────┐                      ┌─────────┐
        │ WAITING │─────────▶│ PUSHING │─────────────────────▶│ LANDING │
        └─────────┘          └─────────┘                      └─────────┘
             │                    │                                │   │
             │      cancelled, failed, expired or peer lost        │   │ last write
             ▼                    ▼                                │   │ done
        ┌──────────────────────────────────┐                       │   ▼
        │             DRAINING             │◀──────────────────────┘ ┌──────┐
        └──────────────────────────────────┘                         │ DONE │
                          │          no write under way              └──────┘
                          └─────────────────────────────────────────────▲

Pages may become ready in any state. One write is under way at a time: what
becomes ready meanwhile goes into the next one, so writes are few and large, and
the write that carries the Landed note starts only when all earlier bytes are in
place. When token #1 comes after the last page's write has started, the note
follows alone.

No write of pages starts after the ticket has expired or the push was given up.
A push that is given up tells the receiver Drained once nothing is under way,
ticket or no ticket: one may be on its way.
Only when it has Ended may its pages be freed.

The machine does no I/O and reads no clock: inputs carry the time and return
what to do.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.v1.transfer_pb2 import TicketBody
from core.errors import BatonError, Cancelled, DeadlineExceeded, Internal, WorkerLost
from core.types import AttemptKey
from kv_transfer.note import drained_note, landed_note


class State(enum.Enum):
    WAITING = enum.auto()
    PUSHING = enum.auto()
    LANDING = enum.auto()
    DRAINING = enum.auto()
    DONE = enum.auto()


class Step(enum.Enum):
    """What moves a push from one state to another."""

    TICKET = enum.auto()
    LAST_WRITE = enum.auto()
    LANDED = enum.auto()
    GIVE_UP = enum.auto()
    DRAINED = enum.auto()


TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.WAITING, Step.TICKET): State.PUSHING,
    (State.WAITING, Step.GIVE_UP): State.DRAINING,
    (State.PUSHING, Step.LAST_WRITE): State.LANDING,
    (State.PUSHING, Step.GIVE_UP): State.DRAINING,
    (State.LANDING, Step.LANDED): State.DONE,
    (State.LANDING, Step.GIVE_UP): State.DRAINING,
    (State.DRAINING, Step.DRAINED): State.DONE,
}


@dataclass(frozen=True, slots=True)
class StartWrite:
    """Write pages and then the note, if any. Answer with write_done or write_failed."""

    peer: str
    local_pages: tuple[int, ...]
    remote_pages: tuple[int, ...]
    note: bytes


@dataclass(frozen=True, slots=True)
class SendNote:
    """Send a note alone. No answer is wanted."""

    peer: str
    note: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """The push is over. It landed unless there is an `error`."""

    error: BatonError | None
    bytes: int
    seconds: float
    exposed_seconds: float


Action = StartWrite | SendNote | Ended


class Sender:
    """The state of one push. Every input returns the actions it leads to."""

    def __init__(self, key: AttemptKey, peer: str, page_bytes: int) -> None:
        self.state = State.WAITING
        self.peer = peer
        self._key = key
        self._page_bytes = page_bytes
        self._pages: list[int] = []  # complete local pages, in the prompt's order
        self._started = 0  # of them, how many are written or being written
        self._remote_pages: Sequence[int] = ()
        self._expires_at = math.inf
        self._first_token: int | None = None
        self._finished_at = math.inf
        self._writing: StartWrite | None = None
        self._write_began = 0.0
        self._peer_lost = False
        self._error: BatonError | None = None
        self._bytes = 0
        self._seconds = 0.0

    @property
    def deadline(self) -> float:
        """When `tick` has something to do; infinity when never."""
        return self._expires_at if self.state is State.PUSHING else math.inf

    def ticket(self, body: TicketBody, now: float) -> list[Action]:
        """The receiver's pages. Its time counts from here, since clocks differ."""
        if self.state is not State.WAITING:
            return []
        if AttemptKey(body.request_id, body.epoch) != self._key:
            return self.fail(Internal("the ticket is for another attempt"))
        if body.agent != self.peer:
            return self.fail(Internal("the ticket is another worker's"))
        self._take(Step.TICKET)
        self._remote_pages = tuple(body.pages)
        self._expires_at = now + body.expires_after_seconds
        return self._advance(now)

    def pages_ready(self, pages: Sequence[int], now: float) -> list[Action]:
        """More local pages are complete; they follow those given before."""
        self._pages += pages
        return self._advance(now)

    def finish(
        self, first_token: int, pages: Sequence[int], finished_at: float, now: float
    ) -> list[Action]:
        """`pages` are the last ones; compute was over at `finished_at`."""
        self._pages += pages
        self._first_token = first_token
        self._finished_at = finished_at
        return self._advance(now)

    def write_done(self, now: float) -> list[Action]:
        self._bytes += self._page_bytes * len(self._end_write(now).local_pages)
        if self.state is State.LANDING:
            self._take(Step.LANDED)
            return [Ended(None, self._bytes, self._seconds, now - self._finished_at)]
        if self.state is State.DRAINING:
            return self._drain()
        return self._advance(now)

    def write_failed(self, error: BatonError, now: float) -> list[Action]:
        self._end_write(now)
        return self._drain() if self.state is State.DRAINING else self.fail(error)

    def cancel(self) -> list[Action]:
        return self.fail(Cancelled("the request was cancelled"))

    def peer_lost(self) -> list[Action]:
        """The receiver is gone. A write under way still ends with write_failed."""
        self._peer_lost = True
        return self.fail(WorkerLost(f"the decode worker's agent {self.peer} is lost"))

    def tick(self, now: float) -> list[Action]:
        if now < self.deadline:
            return []
        return self.fail(DeadlineExceeded("the ticket expired before all pages were sent"))

    def fail(self, error: BatonError) -> list[Action]:
        """Gives the push up. The first error is the one that is reported."""
        if not self._live:
            return []
        self._take(Step.GIVE_UP)
        self._error = error
        return self._drain()

    @property
    def _live(self) -> bool:
        return self.state not in (State.DRAINING, State.DONE)

    def _take(self, step: Step) -> None:
        self.state = TRANSITIONS[self.state, step]

    def _advance(self, now: float) -> list[Action]:
        """Starts the next write when there is something to write and none is under way."""
        if self.state is not State.PUSHING or self._writing is not None:
            return []
        if now >= self._expires_at:
            return self.tick(now)
        if misfit := self._misfit():
            return self.fail(Internal(misfit))
        note = b""
        if self._first_token is not None:
            self._take(Step.LAST_WRITE)
            note = landed_note(self._key, self._first_token, len(self._pages))
        elif self._started == len(self._pages):
            return []
        return [self._start_write(note, now)]

    def _misfit(self) -> str:
        """Why the pages cannot fill the reservation; empty when they can."""
        ready, reserved = len(self._pages), len(self._remote_pages)
        finished = self._first_token is not None
        if ready > reserved or (finished and ready < reserved):
            return f"{ready} pages were made for {reserved} reserved ones"
        return ""

    def _start_write(self, note: bytes, now: float) -> StartWrite:
        new = slice(self._started, len(self._pages))
        self._started = len(self._pages)
        self._write_began = now
        self._writing = StartWrite(
            self.peer, tuple(self._pages[new]), tuple(self._remote_pages[new]), note
        )
        return self._writing

    def _end_write(self, now: float) -> StartWrite:
        if self._writing is None:
            raise Internal("a write ended that was not under way")
        ended, self._writing = self._writing, None
        self._seconds += now - self._write_began
        return ended

    def _drain(self) -> list[Action]:
        if self._writing is not None:
            return []
        self._take(Step.DRAINED)
        ended = Ended(self._error, self._bytes, self._seconds, 0.0)
        if self._peer_lost:
            return [ended]
        return [SendNote(self.peer, drained_note(self._key)), ended]

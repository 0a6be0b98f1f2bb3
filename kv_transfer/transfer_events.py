"""What a transfer thread tells its worker.

For each push exactly one PushEnded, and before it at most one PushFailed. For
each reservation: at most one Arrived or ReservationFailed; and, unless it arrived,
exactly one ReservationFreed. For each fetch the same, with Fetched for Arrived.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.core.types import AttemptKey


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """The answer to `connect`. `error` is None when pages can be pushed there."""

    worker_id: str
    agent: str
    error: BatonError | None


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """A decode worker that was connected is lost. Connect again to reach it."""

    worker_id: str
    agent: str


@dataclass(frozen=True, slots=True)
class PushFailed:
    """A push was given up while a write was under way. Its pages are freed only at PushEnded."""

    key: AttemptKey
    error: BatonError


@dataclass(frozen=True, slots=True)
class PushEnded:
    """A push is over and its pages may be freed. It arrived unless there is an `error`."""

    key: AttemptKey
    error: BatonError | None
    bytes: int
    seconds: float
    """Time during which a write was under way."""
    exposed_seconds: float
    """From the end of compute to the end of the last write."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """All pages of a reservation are in place and belong to the worker from now on."""

    key: AttemptKey
    first_token: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """Pages that were asked for are in place and belong to the worker from now on."""

    key: AttemptKey
    pages: int
    """How many, counted from the first: what the other side had."""
    seconds: float
    """Since they were asked for."""


@dataclass(frozen=True, slots=True)
class PagesDamaged:
    """Pages arrived that are not what was sent. They are being sent again, or the push fails."""

    key: AttemptKey
    count: int


@dataclass(frozen=True, slots=True)
class ReservationFailed:
    """Nothing usable will land. The pages may be freed only at ReservationFreed, which follows.

    There is no `error` when the sender gave up: its worker says why, or was told to.
    """

    key: AttemptKey
    error: BatonError | None


@dataclass(frozen=True, slots=True)
class ReservationFreed:
    """No write can reach the reserved pages any more."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class PushOverdue:
    """A push was given up, and a write still reads its pages though there was time to end.
    PushEnded follows, one day."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class ReservationOverdue:
    """Pages that are not wanted any more are still held, since the sender has not let go of
    them though there was time. ReservationFreed follows, one day."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class PagesWanted:
    """A peer wants to fetch cached pages. Comes once a fetch. Answer with `lend` or `decline`."""

    key: AttemptKey
    peer: str  # its agent
    ticket: bytes  # where they go
    page_keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TransferCrashed:
    """The transfer thread has stopped on a fault of its own; no more events will come."""

    reason: str


TransferEvent = (
    PeerConnected
    | PeerDisconnected
    | PushFailed
    | PushEnded
    | Arrived
    | Fetched
    | PagesDamaged
    | PagesWanted
    | PushOverdue
    | ReservationFailed
    | ReservationFreed
    | ReservationOverdue
    | TransferCrashed
)

"""What a transfer thread tells its worker.

For each push exactly one PushEnded. For each reservation: at most one Landed
or ReservationFailed; and, unless it landed, exactly one ReservationFreed.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import BatonError
from core.types import AttemptKey


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
class PushEnded:
    """A push is over and its pages may be freed. It landed unless there is an `error`."""

    key: AttemptKey
    error: BatonError | None
    bytes: int
    seconds: float
    """Time during which a write was under way."""
    exposed_seconds: float
    """From the end of compute to the end of the last write."""


@dataclass(frozen=True, slots=True)
class Landed:
    """All pages of a reservation are in place and belong to the worker from now on."""

    key: AttemptKey
    first_token: int


@dataclass(frozen=True, slots=True)
class ReservationFailed:
    """Nothing usable will land. The pages may be freed only at ReservationFreed, which follows."""

    key: AttemptKey
    error: BatonError


@dataclass(frozen=True, slots=True)
class ReservationFreed:
    """No write can reach the reserved pages any more."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class TransferCrashed:
    """The transfer thread has stopped on a fault of its own; no more events will come."""

    reason: str


TransferEvent = (
    PeerConnected
    | PeerDisconnected
    | PushEnded
    | Landed
    | ReservationFailed
    | ReservationFreed
    | TransferCrashed
)

"""The commands that a worker posts to its transfer thread, and the events that come back.

For each push there is exactly one PushEnded, and before it at most one PushFailed.
For each reservation there is at most one Arrived or ReservationFailed and, unless
it arrived, exactly one ReservationFreed. The same holds for each fetch, with
Fetched instead of Arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.core.types import AttemptKey, DeviceEvent
from baton.v1.transfer_pb2 import PoolAddress

# Commands, on a prefill worker.


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """Prepares pushes to a decode worker -> PeerConnected."""

    worker_id: str
    address: PoolAddress


@dataclass(frozen=True, slots=True)
class OpenPush:
    """Begins a push to the agent `peer` -> exactly one PushEnded."""

    key: AttemptKey
    peer: str


@dataclass(frozen=True, slots=True)
class DeliverTicket:
    """Gives a push its ticket. Without an open push the receiver gets Drained; PagesWanted is
    declined in this way."""

    key: AttemptKey
    ticket: bytes


@dataclass(frozen=True, slots=True)
class PushPages:
    """Adds local pages to a push, in the prompt's order. They are complete now, on a GPU too; or,
    if `TransferThread.pushes_ahead`, once `after` has passed."""

    key: AttemptKey
    pages: Sequence[int]
    after: DeviceEvent | None = None


@dataclass(frozen=True, slots=True)
class FinishPush:
    """Compute has ended, and `pages` are the last ones."""

    key: AttemptKey
    first_token: int
    pages: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class CancelPush:
    """Starts no more writes; PushEnded comes when those under way have ended."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class StartFetch:
    """Asks the agent `holder` to push its cached pages of `page_keys` into the first of `pages`
    -> Fetched, or ReservationFailed and ReservationFreed.

    `ticket` is for `pages`. Fails after `seconds`.
    """

    key: AttemptKey
    holder: str
    ticket: bytes
    pages: Sequence[int]
    page_keys: Sequence[bytes]
    seconds: float


# On a decode worker.


@dataclass(frozen=True, slots=True)
class ExpectPages:
    """Expects `pages` from the agent `sender` -> Arrived, or ReservationFailed and
    ReservationFreed.

    Must be posted before the ticket leaves the worker.
    """

    key: AttemptKey
    sender: str
    pages: Sequence[int]
    seconds: float  # until the ticket expires


@dataclass(frozen=True, slots=True)
class LendPages:
    """Answers PagesWanted with the pages of its first keys -> exactly one PushEnded."""

    key: AttemptKey
    peer: str
    ticket: bytes
    pages: Sequence[int]


# On either.


@dataclass(frozen=True, slots=True)
class ReleaseReservation:
    """Ends a reservation or fetch -> ReservationFreed, once no write can reach its pages.

    An event that was already on its way may come first; ignore it.
    """

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class SenderDied:
    """Reports that a sender's process has ended -> ReservationFreed for all its reservations, once
    none of its bytes can arrive any more."""

    agent: str


TransferCommand = (
    ConnectPeer
    | OpenPush
    | DeliverTicket
    | PushPages
    | FinishPush
    | CancelPush
    | StartFetch
    | ExpectPages
    | LendPages
    | ReleaseReservation
    | SenderDied
)

# Events.


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """Answers ConnectPeer. `error` is None when pages can be pushed there."""

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
    """A push has failed during a write. Its pages may be freed only at PushEnded."""

    key: AttemptKey
    error: BatonError


@dataclass(frozen=True, slots=True)
class PushEnded:
    """A push has ended and its pages may be freed. All pages arrived unless there is an `error`."""

    key: AttemptKey
    error: BatonError | None
    bytes: int
    seconds: float  # during which a write was under way
    exposed_seconds: float  # from the end of compute to the end of the last write


@dataclass(frozen=True, slots=True)
class Arrived:
    """All pages of a reservation are in place and belong to the worker from now on."""

    key: AttemptKey
    first_token: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """Fetched pages are in place and belong to the worker from now on."""

    key: AttemptKey
    pages: int  # how many, counted from the first
    seconds: float  # since the request


@dataclass(frozen=True, slots=True)
class PagesDamaged:
    """Pages arrived damaged. They are sent again, or the push fails."""

    key: AttemptKey
    count: int


@dataclass(frozen=True, slots=True)
class ReservationFailed:
    """Nothing usable will arrive. The pages may be freed only at ReservationFreed, which follows.

    Without an `error` the sender gave up, and its worker reports why.
    """

    key: AttemptKey
    error: BatonError | None


@dataclass(frozen=True, slots=True)
class ReservationFreed:
    """No write can reach the reserved pages any more."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class PushOverdue:
    """A push has failed, and a write still reads its pages after a while. PushEnded follows."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class ReservationOverdue:
    """Pages that are not wanted any more are still in quarantine after a while.
    ReservationFreed follows."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class PagesWanted:
    """A peer wants to fetch cached pages; once per fetch. Post LendPages or DeliverTicket."""

    key: AttemptKey
    peer: str  # its agent
    ticket: bytes  # where they go
    page_keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TransferCrashed:
    """The transfer thread has stopped; no more events follow."""

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

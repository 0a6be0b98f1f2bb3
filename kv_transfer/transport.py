"""The interface of all transports.

A transport serves one pool. It writes pages of its own pool into a peer's pool,
and receives the notes that peers attach to their writes. One thread drives it,
from `register` to `close`; `write` may block while bytes are copied. A
`SlicingTransport` can copy a part of each page, for pools whose heads are split
differently.

It guarantees:

- Writes are not ordered. A note is delivered only when all bytes of its write are
  in place.
- Every accepted write ends in exactly one WriteDone or WriteFailed. Either way no
  byte of it is in flight any more.
- When a peer is lost, PeerLost comes first, then WriteFailed for each of its
  writes in flight. Connect again to reach it, which is refused until its PeerLost
  has been polled.
- A frozen or silently cut-off peer is not detected. Deadlines are the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.errors import BatonError, Internal, LayoutMismatch, WorkerLost
from baton.core.types import DeviceEvent
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout, Route


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """The memory of a pool: `total_pages` contiguous pages of `page_bytes`."""

    base: int  # the address of the first byte
    page_bytes: int
    total_pages: int
    device: str  # "cpu" or "cuda"
    device_id: int = 0

    @property
    def size(self) -> int:
        return self.page_bytes * self.total_pages


@dataclass(frozen=True, slots=True)
class PagePart:
    """The bytes copied of each page, which is `rows` rows of equal length at either end."""

    rows: int
    row_bytes: int  # copied of each row
    local_offset: int  # where in a row these bytes begin
    remote_offset: int


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Pages to copy to a peer, pair by pair, and a note to deliver after them, or alone."""

    peer: str
    local_pages: Sequence[int] = ()
    remote_pages: Sequence[int] = ()
    note: bytes = b""
    after: DeviceEvent | None = None  # no page is read before

    @property
    def ready(self) -> bool:
        return self.after is None or self.after.query()


@dataclass(frozen=True, slots=True)
class WriteDone:
    write: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    write: int
    error: BatonError


@dataclass(frozen=True, slots=True)
class Noted:
    """A note of the agent `peer`."""

    peer: str
    note: bytes


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A peer cannot be reached any more. If it is `gone`, its own writes cannot arrive any more
    either: its process has ended, or the shared connection."""

    peer: str
    gone: bool = True


TransportEvent = WriteDone | WriteFailed | Noted | PeerLost


class Transport(Protocol):
    """Moves pages. The module's docstring lists its guarantees."""

    def register(self, memory: PoolMemory, layout: PoolLayout) -> PoolAddress:
        """Starts the transport and makes the pool reachable; once, before anything else.

        The memory must stay allocated until `close`.
        """

    def connect(self, address: PoolAddress) -> str:
        """Makes a peer's pool writable and returns the peer's agent name.

        Connecting a connected peer changes nothing. Raises LayoutMismatch when
        the pages differ in size, WorkerLost when the peer cannot be reached.
        """

    def disconnect(self, peer: str) -> None:
        """Forgets a peer without writes in flight, if it is known."""

    def write(self, write: PageWrite) -> int:
        """Starts a write and returns its number. Raises WorkerLost when the peer is not connected,
        Internal when a page is outside of its pool."""

    def poll(self) -> list[TransportEvent]:
        """The events since the last call. Never blocks.

        Some transports progress only here, also for their peers: call it periodically.
        """

    def close(self) -> None:
        """Releases the memory and all peers. May be repeated."""


class SlicingTransport(Transport, Protocol):
    """A transport that can copy a part of each page, chosen per peer."""

    def connect(self, address: PoolAddress, part: PagePart | None = None) -> str:
        """As `Transport.connect`. With a `part`, which must be inside of both pages, these may
        differ in size. It is fixed until `disconnect`."""


def check_pages(write: PageWrite, local_total: int, remote_total: int) -> None:
    """Raises Internal unless the pages pair up and are inside of their pools."""
    local, remote = write.local_pages, write.remote_pages
    if len(local) != len(remote):
        raise Internal(f"{len(local)} pages do not fit into {len(remote)}")
    for pages, total in ((local, local_total), (remote, remote_total)):
        if pages and not 0 <= min(pages) <= max(pages) < total:
            raise Internal(f"pages {min(pages)} to {max(pages)} leave a pool of {total}")


def check_polled(events: Sequence[TransportEvent], peer: str) -> None:
    """Raises WorkerLost while a peer's PeerLost has not been polled: it would seem to be about the
    next connection."""
    if any(isinstance(event, PeerLost) and event.peer == peer for event in events):
        raise WorkerLost(f"the connection to {peer} has just been lost")


def check_page_size(memory: PoolMemory, address: PoolAddress, part: PagePart | None = None) -> None:
    """Raises LayoutMismatch when whole pages are copied and the peer's differ in size."""
    if part is None and address.page_bytes != memory.page_bytes:
        raise LayoutMismatch(
            f"a page is {memory.page_bytes} bytes here and {address.page_bytes} bytes "
            f"at {address.agent}"
        )


def pool_address(
    transport: str, agent: str, metadata: bytes, memory: PoolMemory, layout: PoolLayout
) -> PoolAddress:
    """The address of `memory` over one transport."""
    return PoolAddress(
        agent=agent,
        base=memory.base,
        page_bytes=memory.page_bytes,
        total_pages=memory.total_pages,
        device=memory.device,
        device_id=memory.device_id,
        layout=layout,
        routes=[Route(transport=transport, metadata=metadata)],
    )


def route_metadata(address: PoolAddress, transport: str) -> bytes:
    """The pool's route metadata. Raises WorkerLost where the transport does not lead there."""
    for route in address.routes:
        if route.transport == transport:
            return route.metadata
    raise WorkerLost(f"{address.agent} cannot be reached over {transport}")

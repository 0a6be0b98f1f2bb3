"""What every way of moving pages between two pools can do.

A transport serves one pool. It writes pages of its own pool into the pool of a
peer, and hears the notes that peers attach to their writes. One thread drives
it, from `register` to `close`; `write` may block while bytes are copied.

Where two pools split a model's heads differently, only some heads of a page go
from one memory to another: a `SlicingTransport` copies a part of each page.

What a caller may rely on:

- Writes are not ordered among themselves. A note is: the peer hears it only
  when all bytes of the write that carries it are in place.
- Every accepted write ends in exactly one WriteDone or WriteFailed. Either
  way no byte of it is under way any more.
- When a peer is found lost, PeerLost comes first, then WriteFailed for each of
  its writes under way. The peer is forgotten; connect again to reach it, which
  is refused until its PeerLost has been polled.
- A peer that is frozen or silently cut off is not found lost. Deadlines are
  the caller's.
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
    """The memory of a pool: `total_pages` pages of `page_bytes`, one after the other."""

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
    """What is copied of each page, where a page is `rows` rows of equal length at either end."""

    rows: int
    row_bytes: int  # copied of each row
    local_offset: int  # where in a row these bytes begin
    remote_offset: int


@dataclass(frozen=True, slots=True)
class WriteDone:
    write: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    write: int
    error: BatonError


@dataclass(frozen=True, slots=True)
class Noted:
    """A peer's note. `peer` is the agent that sent it."""

    peer: str
    note: bytes


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A peer cannot be reached any more. If it is `gone`, none of its own writes into this
    pool arrives any more either: its process has ended, or the connection that both used."""

    peer: str
    gone: bool = True


TransportEvent = WriteDone | WriteFailed | Noted | PeerLost


class Transport(Protocol):
    """Moves pages. See the module's docstring for what holds across its methods."""

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
        """Forgets a peer that no write is under way to. An unknown one is fine."""

    def write(
        self,
        peer: str,
        local_pages: Sequence[int],
        remote_pages: Sequence[int],
        note: bytes = b"",
        after: DeviceEvent | None = None,
    ) -> int:
        """Starts copying pages, pair by pair, and returns the write's number.

        Pages that are neighbours on both sides travel as one piece. Without
        pages only the note is sent. No page is read before the moment `after`
        has passed. Raises WorkerLost when the peer is not connected, Internal
        when a page is outside of its pool.
        """

    def poll(self) -> list[TransportEvent]:
        """What has happened since the last call. Never blocks.

        Some transports progress only here, for their peers' sake too: call it
        now and then even when nothing is expected.
        """

    def close(self) -> None:
        """Lets go of the memory and of all peers. Closing twice is fine."""


class SlicingTransport(Transport, Protocol):
    """A transport that can be told, peer by peer, to copy only a part of each page."""

    def connect(self, address: PoolAddress, part: PagePart | None = None) -> str:
        """As `Transport.connect`. With a `part` pages may differ in size; those who write
        know that it is inside of both. It stays the same until the peer is forgotten."""


def check_pages(
    local_pages: Sequence[int], local_total: int, remote_pages: Sequence[int], remote_total: int
) -> None:
    """Raises Internal when the pages do not pair up, or one is outside of its pool."""
    if len(local_pages) != len(remote_pages):
        raise Internal(f"{len(local_pages)} pages do not fit into {len(remote_pages)}")
    for pages, total in ((local_pages, local_total), (remote_pages, remote_total)):
        if pages and not 0 <= min(pages) <= max(pages) < total:
            raise Internal(f"pages {min(pages)} to {max(pages)} leave a pool of {total}")


def check_told(events: Sequence[TransportEvent], peer: str) -> None:
    """Raises WorkerLost while a peer's loss is among the events that nobody has polled: that
    would seem to be about its next connection."""
    if any(isinstance(event, PeerLost) and event.peer == peer for event in events):
        raise WorkerLost(f"the connection to {peer} has just been lost")


def check_page_size(memory: PoolMemory, address: PoolAddress, part: PagePart | None = None) -> None:
    """Raises LayoutMismatch when a peer's pages are to be copied whole and are not as large
    as ours."""
    if part is None and address.page_bytes != memory.page_bytes:
        raise LayoutMismatch(
            f"a page is {memory.page_bytes} bytes here and {address.page_bytes} bytes "
            f"at {address.agent}"
        )


def pool_address(
    transport: str, agent: str, metadata: bytes, memory: PoolMemory, layout: PoolLayout
) -> PoolAddress:
    """How peers reach `memory` through `agent`, by one transport."""
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
    """What `transport` needs to reach the pool. Raises WorkerLost where it does not lead there."""
    for route in address.routes:
        if route.transport == transport:
            return route.metadata
    raise WorkerLost(f"{address.agent} cannot be reached over {transport}")

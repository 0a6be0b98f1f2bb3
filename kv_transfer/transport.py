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
  writes in flight. Connect again to reach it; this is refused until its PeerLost
  has been polled.
- A frozen or silently cut-off peer is not detected. Deadlines are the caller's.
"""

from __future__ import annotations

import itertools
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Protocol, TypeVar

from baton.core.errors import BatonError, Internal, InvalidConfig, LayoutMismatch, WorkerLost
from baton.core.types import DeviceEvent
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout, Route

_numbers = itertools.count(1)


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
    """The part of each page to copy. At both ends a page is `rows` rows of equal length."""

    rows: int
    row_bytes: int  # how many bytes of each row are copied
    local_offset: int  # where in a row they begin
    remote_offset: int


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Pages to copy to a peer, pair by pair, and a note to deliver after them, or alone."""

    peer: str
    local_pages: Sequence[int] = ()
    remote_pages: Sequence[int] = ()
    note: bytes = b""
    after: DeviceEvent | None = None  # pages are read only after it
    # Unique in the process that made it, over all its transports.
    number: int = field(default_factory=lambda: next(_numbers), compare=False)

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
    """A peer cannot be reached any more. If it is `gone`, its own writes cannot arrive either:
    its process or the shared connection has ended."""

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
            raise Internal(f"pages {min(pages)} to {max(pages)} are outside a pool of {total}")


def check_page_size(here: int, address: PoolAddress) -> None:
    """Raises LayoutMismatch when the peer's pages differ in size."""
    if address.page_bytes != here:
        raise LayoutMismatch(
            f"a page is {here} bytes here and {address.page_bytes} bytes at {address.agent}"
        )


class _Peer(Protocol):
    @property
    def total_pages(self) -> int: ...


AnyPeer = TypeVar("AnyPeer", bound=_Peer)


class BaseTransport(ABC, Generic[AnyPeer]):
    """Base class of transports with one kind of route: keeps peers and events, checks arguments."""

    name: ClassVar[str]  # of the route
    devices: ClassVar[tuple[str, ...]]  # whose memory it can serve

    def __init__(self, agent: str = "") -> None:
        self.agent = agent or f"{self.name}-{uuid.uuid4().hex}"
        self._memory: PoolMemory | None = None
        self._peers: dict[str, AnyPeer] = {}
        self._events: list[TransportEvent] = []

    def register(self, memory: PoolMemory, layout: PoolLayout) -> PoolAddress:
        if memory.device not in self.devices:
            raise InvalidConfig(f"transport {self.name} cannot serve {memory.device!r} memory")
        metadata = self._open(memory)
        self._memory = memory
        return PoolAddress(
            agent=self.agent,
            base=memory.base,
            page_bytes=memory.page_bytes,
            total_pages=memory.total_pages,
            device=memory.device,
            device_id=memory.device_id,
            layout=layout,
            routes=[Route(transport=self.name, metadata=metadata)],
        )

    def connect(self, address: PoolAddress, part: PagePart | None = None) -> str:
        peer = address.agent
        if peer not in self._peers:
            self._check_polled(peer)
            if part is None:
                check_page_size(self._registered.page_bytes, address)
            self._peers[peer] = self._connect(address, part)
        return peer

    def write(self, write: PageWrite) -> int:
        known = self._peers.get(write.peer)
        if known is None:
            raise WorkerLost(f"not connected to {write.peer}")
        check_pages(write, self._registered.total_pages, known.total_pages)
        self._write(write, known)
        return write.number

    @abstractmethod
    def _open(self, memory: PoolMemory) -> bytes:
        """Makes the memory reachable and returns its route's metadata."""

    @abstractmethod
    def _connect(self, address: PoolAddress, part: PagePart | None) -> AnyPeer: ...

    @abstractmethod
    def _write(self, write: PageWrite, peer: AnyPeer) -> None: ...

    @property
    def _registered(self) -> PoolMemory:
        if self._memory is None:
            raise Internal(f"{self.agent} serves no memory")
        return self._memory

    def _check_polled(self, peer: str) -> None:
        """Raises WorkerLost while a peer's PeerLost has not been polled: it would be taken for the
        next connection's."""
        if any(isinstance(event, PeerLost) and event.peer == peer for event in self._events):
            raise WorkerLost(f"the connection to {peer} has just been lost")

    def _metadata(self, address: PoolAddress) -> bytes:
        """The metadata of the route to a pool. Raises WorkerLost if there is none."""
        for route in address.routes:
            if route.transport == self.name:
                return route.metadata
        raise WorkerLost(f"{address.agent} cannot be reached over {self.name}")

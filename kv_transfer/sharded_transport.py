"""A transport for pools whose heads are split among several processes.

It serves one pool. Each shard of the pool is served by a transport in the process
that holds it, and pages go from every shard of ours directly to every shard of
the peer's that has heads in common with it (kv_transfer/pool_layout.py says which
bytes). These pairs are links.

            ours                      the peer's
        shard 0 (heads 0-3) ─┬─▶ shard 0 (heads 0-7)    a write is done when all
        shard 1 (heads 4-7) ─┘                          its parts are

- If neither side is split, there is one link, over which whole pages go.
- Shards that hold whole pages are replicas: each gets a link from one of ours.
- Notes go between the first shards. A note of a write is sent when its parts on
  all links are done; with one link only, with the pages.
- A peer is lost as a whole when one link breaks. Its writes fail when the last of
  their parts has ended, on any link.
- A peer is gone when all links are: no process of it can write here any more.
  Nothing else is sent over the links between other shards, so once a peer is lost
  they are probed until they break too or the peer is connected again.
- A page's digest combines the digests of the parts that go over each link. Both ends
  know these parts, whichever way they split the heads.
- When a process of ours ends, `poll` raises: see kv_transfer/shard_process.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from baton.core.errors import BatonError, WorkerLost
from baton.kv_transfer.pool_layout import HeadLink, HeadRange, PageDigest, join_digests, links
from baton.kv_transfer.shard_process import ShardProxy
from baton.kv_transfer.transport import (
    Noted,
    PageWrite,
    PeerLost,
    PoolMemory,
    SlicingTransport,
    TransportEvent,
    WriteDone,
    WriteFailed,
    check_pages,
)
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout, PoolShard

PROBE_SECONDS = 0.2
"""Interval of probes over a lost peer's links."""

PROBE = b"\1"
"""An empty note, unlike any of a transfer thread."""


_LinkKey = tuple[int, str]
"""A link: the rank of our shard, and the agent of the peer's."""


@dataclass(slots=True)
class _Peer:
    total_pages: int
    links: dict[_LinkKey, HeadLink]  # the first one takes notes
    broken: set[_LinkKey] = field(default_factory=set)  # links to which nothing can be written
    gone: set[_LinkKey] = field(default_factory=set)  # of these, links over which nothing arrives
    probe_at: float = 0.0


@dataclass(slots=True)
class _Write:
    peer: str
    note: bytes  # sent when all parts are done; empty without one, or when it was sent
    parts: int = 0  # under way
    error: BatonError | None = None


class ShardedTransport:
    """Serves one pool: a shard with `heads` over `own`, and `others` in their processes.

    `digest` digests the pages of our own shard.
    """

    def __init__(
        self,
        own: SlicingTransport,
        heads: HeadRange,
        others: Sequence[ShardProxy] = (),
        digest: PageDigest | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = own
        self._others = others
        self._shards: list[SlicingTransport | ShardProxy] = [own, *others]
        self._heads = [heads]
        self._digest = digest
        self._clock = clock
        self._total_pages = 0
        self._page_bytes = 0  # of a whole page
        self._peers: dict[str, _Peer] = {}  # the connected ones
        self._lost: set[str] = set()  # of these, those with a broken link
        self._writes: dict[int, _Write] = {}
        self._parts: dict[int, int] = {}  # the writes that parts under way belong to
        self._events: list[TransportEvent] = []

    def register(self, memory: PoolMemory, layout: PoolLayout) -> PoolAddress:
        """`memory` is our own shard's, `layout` the whole pool's."""
        address = self._own.register(memory, layout)
        self._total_pages, self._page_bytes = memory.total_pages, memory.page_bytes
        if not self._others:
            return address
        first, count = self._heads[0]
        shards = [PoolShard(first_head=first, heads=count, pool=address)]
        shards += [other.register(layout) for other in self._others]
        self._heads = [HeadRange(shard.first_head, shard.heads) for shard in shards]
        self._page_bytes = memory.page_bytes * layout.kv_heads // count
        return _whole_address(shards, layout, self._page_bytes)

    def connect(self, address: PoolAddress) -> str:
        known = address.agent in self._peers
        if known and address.agent not in self._lost:
            return address.agent
        planned = links(self._heads, self._page_bytes, address)
        connected: dict[_LinkKey, HeadLink] = {}
        try:
            for link in planned:
                self._shards[link.shard].connect(link.pool, link.part)
                connected[link.shard, link.pool.agent] = link
        except BatonError:
            if not known:
                self._disconnect(connected)
            raise
        self._lost.discard(address.agent)
        self._peers[address.agent] = _Peer(address.total_pages, connected)
        return address.agent

    def disconnect(self, peer: str) -> None:
        self._lost.discard(peer)
        if known := self._peers.pop(peer, None):
            self._disconnect(known.links)

    def write(self, write: PageWrite) -> int:
        known = self._peers.get(write.peer)
        if known is None or write.peer in self._lost:
            raise WorkerLost(f"not connected to {write.peer}")
        check_pages(write, self._total_pages, known.total_pages)
        keys = list(known.links)
        alone = not write.local_pages or len(keys) == 1
        state = self._writes[write.number] = _Write(write.peer, b"" if alone else write.note)
        note = write.note if alone else b""
        for shard, agent in keys[:1] if alone else keys:
            part = PageWrite(agent, write.local_pages, write.remote_pages, note, write.after)
            self._begin(write.number, shard, part)
        if state.error is not None and not state.parts:
            del self._writes[write.number]
            raise state.error
        return write.number

    def digests(self, peer: str, pages: Sequence[int]) -> list[int]:
        """The digests of pages of this pool that go to a peer, or came from there."""
        if self._digest is None or peer not in self._peers:
            return []
        planned = list(self._peers[peer].links.values())
        for link in planned:
            if link.shard > 0:
                self._others[link.shard - 1].begin_digests(pages, link.part)
        parts = [
            self._others[link.shard - 1].end_digests()
            if link.shard > 0
            else self._digest(pages, link.part)
            for link in planned
        ]
        return join_digests([link.first_head for link in planned], parts)

    def poll(self) -> list[TransportEvent]:
        for rank, shard in enumerate(self._shards):
            for event in shard.poll():
                self._handle(rank, event)
        self._probe()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        for shard in self._shards:
            shard.close()
        for table in (self._peers, self._lost, self._writes, self._parts):
            table.clear()

    def _disconnect(self, links: Iterable[_LinkKey]) -> None:
        for shard, agent in links:
            self._shards[shard].disconnect(agent)

    def _begin(self, number: int, shard: int, part: PageWrite) -> None:
        """Starts a part of a write, unless an earlier part failed."""
        state = self._writes[number]
        if state.error is not None:
            return
        try:
            self._shards[shard].write(part)
        except BatonError as error:
            state.error = error
        else:
            self._parts[part.number] = number
            state.parts += 1

    def _handle(self, rank: int, event: TransportEvent) -> None:
        match event:
            case WriteDone(part) if part in self._parts:
                self._end_part(part, None)
            case WriteFailed(part, error) if part in self._parts:
                self._end_part(part, error)
            case PeerLost(agent, gone) if name := self._peer_of((rank, agent)):
                self._break(name, (rank, agent), gone=gone)
            case PeerLost():
                self._events.append(event)
            case Noted(_, note) if note != PROBE:
                self._events.append(event)

    def _end_part(self, part: int, error: BatonError | None) -> None:
        number = self._parts.pop(part)
        write = self._writes[number]
        write.parts -= 1
        write.error = write.error or error
        if not write.parts:
            self._advance(number, write)

    def _advance(self, number: int, write: _Write) -> None:
        """Called when all parts have ended: sends the note if that is still to do, else ends the
        write."""
        note, write.note = write.note, b""
        if note and write.error is None:
            shard, agent = next(iter(self._peers[write.peer].links))
            self._begin(number, shard, PageWrite(agent, note=note))
        if write.parts:
            return
        del self._writes[number]
        failed = write.error
        self._events.append(WriteDone(number) if failed is None else WriteFailed(number, failed))

    def _peer_of(self, link: _LinkKey) -> str | None:
        return next((name for name, peer in self._peers.items() if link in peer.links), None)

    def _break(self, name: str, link: _LinkKey, *, gone: bool) -> None:
        """Marks a link as broken. The peer is lost with its first and gone with its last link."""
        peer = self._peers[name]
        peer.broken.add(link)
        if gone:
            peer.gone.add(link)
        all_gone = len(peer.gone) == len(peer.links)
        if name not in self._lost or all_gone:
            self._events.append(PeerLost(name, gone=all_gone))
        self._lost.add(name)
        self._fail_writes(name)
        if all_gone:
            self._lost.remove(name)
            del self._peers[name]

    def _fail_writes(self, peer: str) -> None:
        """Fails writes to a lost peer once their parts have ended."""
        for write in self._writes.values():
            if write.peer == peer and write.error is None:
                write.error = WorkerLost(f"{peer} is lost")

    def _probe(self) -> None:
        for peer in [self._peers[name] for name in sorted(self._lost)]:
            now = self._clock()
            if now >= peer.probe_at:
                peer.probe_at = now + PROBE_SECONDS
                for shard, agent in [link for link in peer.links if link not in peer.broken]:
                    with suppress(BatonError):  # the shard reports it when polled
                        self._shards[shard].write(PageWrite(agent, note=PROBE))


def _whole_address(shards: Sequence[PoolShard], layout: PoolLayout, page_bytes: int) -> PoolAddress:
    """The address of a split pool."""
    first = PoolAddress()
    first.CopyFrom(shards[0].pool)
    for shard in shards:
        shard.pool.ClearField("layout")  # it is in the whole pool's address
    return PoolAddress(
        agent=first.agent,
        page_bytes=page_bytes,
        total_pages=first.total_pages,
        device=first.device,
        device_id=first.device_id,
        layout=layout,
        shards=shards,
    )

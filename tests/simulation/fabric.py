"""The transport between simulated workers: what a real one may do, and worse.

Writes take their time and end in any order; notes overtake each other and may
come twice; bytes are damaged. A connection that breaks loses what is on its way
and is noticed when it is next used. A killed process leaves a write half done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.core.errors import WorkerLost
from baton.core.types import DeviceEvent
from baton.kv_transfer.pool_layout import HeadRange
from baton.kv_transfer.transport import (
    BaseTransport,
    Noted,
    PagePart,
    PageWrite,
    PeerLost,
    PoolMemory,
    TransportEvent,
    WriteDone,
    WriteFailed,
)
from baton.v1.transfer_pb2 import PoolAddress

from .world import World

CELL_BYTES = 8
HEADS = 2
"""Cells of a page that are neighbours, one a head, where workers split heads."""

OnLanding = Callable[["Write"], None]


@dataclass(eq=False, slots=True)
class Endpoint:
    """One side of a connection."""

    peer: SimulatedTransport
    part: PagePart | None  # of a page; None for all that both hold
    alive: bool = True
    gone: bool = True  # if it is not alive: whether the peer cannot write either

    @property
    def total_pages(self) -> int:
        return len(self.peer.memory)


@dataclass(eq=False, slots=True)
class Write:
    sender: SimulatedTransport
    endpoint: Endpoint
    number: int
    local_pages: tuple[int, ...]
    remote_pages: tuple[int, ...]
    note: bytes
    after: DeviceEvent | None = None  # its pages are not read before
    arrived: bool = False

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Which cells of a page are read and written."""
        here, there, part = self.sender.cells, self.endpoint.peer.cells, self.endpoint.part
        if part is None:
            return list(zip(here, there, strict=True))
        size = part.row_bytes // CELL_BYTES
        ours = _rows(here, part.rows, part.local_offset // CELL_BYTES, size)
        theirs = _rows(there, part.rows, part.remote_offset // CELL_BYTES, size)
        return list(zip(ours, theirs, strict=True))

    def copy(self, local: int, remote: int) -> None:
        source, target = self.sender.memory[local], self.endpoint.peer.memory[remote]
        for here, there in self.cells:
            target[there] = source[here]


@dataclass(slots=True)
class Fabric:
    """Everything between the transports of one world."""

    world: World
    on_landing: OnLanding  # called when bytes are about to change
    damage: float = 0.0  # the share of writes that arrive damaged
    duplicates: float = 0.02  # the share of notes that come twice
    agents: dict[str, SimulatedTransport] = field(default_factory=dict)
    stalls: dict[frozenset[str], float] = field(default_factory=dict)  # until when, by pair

    def stall(self, one: SimulatedTransport, other: SimulatedTransport, seconds: float) -> None:
        """Nothing passes between two workers for a while; nobody is told, nothing is lost."""
        self.stalls[frozenset((one.agent, other.agent))] = self.world.now + seconds

    def travel_time(self, sender: SimulatedTransport, endpoint: Endpoint) -> float:
        """How long something that leaves now is on its way."""
        return self._stalled_for(sender, endpoint.peer) + self.world.delay()

    def cut(self, one: SimulatedTransport, other: SimulatedTransport) -> None:
        """Breaks the connection between two live workers."""
        one.break_off(other)
        other.break_off(one)

    def fail(self, one: SimulatedTransport, other: SimulatedTransport) -> None:
        """Only `one` can no longer reach the other."""
        one.break_off(other, gone=False)

    def kill(self, transport: SimulatedTransport) -> None:
        """A process dies. Its host's kernel sends on what it had sent; only after that does a
        peer see the end of the connection."""
        transport.dead = True
        for other in list(self.agents.values()):
            if seconds := self._stalled_for(transport, other):
                self.world.after(
                    seconds, lambda other=other: self._end_connection(transport, other)
                )
            else:
                self._end_connection(transport, other)

    def _end_connection(self, dead: SimulatedTransport, other: SimulatedTransport) -> None:
        for write in list(dead.writes.values()):
            if write.endpoint.peer is other:
                self._abandon(write)
        other.break_off(dead)

    def _stalled_for(self, one: SimulatedTransport, other: SimulatedTransport) -> float:
        until = self.stalls.get(frozenset((one.agent, other.agent)), 0.0)
        return max(until - self.world.now, 0.0)

    def _abandon(self, write: Write) -> None:
        """The sender died: some, all or none of the bytes are there."""
        if not write.arrived and write.endpoint.alive and not write.endpoint.peer.dead:
            self.on_landing(write)
            for local, remote in zip(write.local_pages, write.remote_pages, strict=True):
                if self.world.chance(0.5):
                    write.copy(local, remote)
        write.arrived = True

    def land(self, write: Write) -> None:
        if write.arrived or not write.endpoint.alive:
            return
        world, peer = self.world, write.endpoint.peer
        if peer.stalled and write.sender.waits_for_frozen:
            world.after(0.5, lambda: self.land(write))
            return
        if write.after is not None and not write.after.query():
            if not write.sender.dead:  # else its step is never computed
                world.after(world.delay(), lambda: self.land(write))
            return
        write.arrived = True
        if write.local_pages:
            self.on_landing(write)
        for local, remote in zip(write.local_pages, write.remote_pages, strict=True):
            write.copy(local, remote)
        if write.remote_pages and self.damage and world.chance(self.damage):
            page = peer.memory[world.random.choice(write.remote_pages)]
            place = world.random.randrange(len(write.cells))
            page[write.cells[place][1]] ^= 1 << world.random.randrange(60)
        if write.note:
            self.deliver_note(write.endpoint, write.sender, write.note)
        world.after(world.delay(), lambda: write.sender.end(write, WriteDone(write.number)))

    def deliver_note(self, endpoint: Endpoint, sender: SimulatedTransport, note: bytes) -> None:
        copies = 2 if self.world.chance(self.duplicates) else 1
        for _ in range(copies):
            self.world.after(
                self.travel_time(sender, endpoint),
                lambda: endpoint.peer.hear(Noted(sender.agent, note)) if endpoint.alive else None,
            )


class SimulatedTransport(BaseTransport[Endpoint]):
    """The agent of a worker, or of those of its processes that has some `heads`. `poke` is
    called when `poll` would have something to say."""

    name = "simulated"
    devices = ("cpu",)

    def __init__(
        self,
        fabric: Fabric,
        agent: str,
        memory: list[list[int]],
        heads: HeadRange | None = None,
    ) -> None:
        super().__init__(agent)
        self.memory = memory
        every = range(len(memory[0]))
        self.cells = [  # of a page, those that are here
            cell for cell in every if not heads or heads.first <= cell % HEADS < heads.end
        ]
        self.poke: Callable[[], None] = lambda: None
        self.dead = False
        self.stalled = False  # its process is frozen
        self.waits_for_frozen = fabric.world.chance(0.5)  # as over TCP; RDMA does not
        self.writes: dict[int, Write] = {}
        self._fabric = fabric
        fabric.agents[agent] = self

    def _open(self, memory: PoolMemory) -> bytes:
        return b""

    def _connect(self, address: PoolAddress, part: PagePart | None) -> Endpoint:
        peer = self._fabric.agents[address.agent]
        if peer.dead:
            raise WorkerLost(f"{address.agent} is dead")
        return Endpoint(peer, part)

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def _write(self, write: PageWrite, endpoint: Endpoint) -> None:
        number = write.number
        pages = tuple(write.local_pages), tuple(write.remote_pages)
        started = Write(self, endpoint, number, *pages, write.note, write.after)
        if not endpoint.alive:
            self.writes[number] = started
            self._lose(write.peer)
        elif write.local_pages:
            self.writes[number] = started
            seconds = self._fabric.travel_time(self, endpoint)
            self._fabric.world.after(seconds, lambda: self._fabric.land(started))
        else:
            self._fabric.deliver_note(endpoint, self, write.note)
            self._add(WriteDone(number))

    def poll(self) -> list[TransportEvent]:
        lost = [each for each in self.writes.values() if not (each.endpoint.alive or each.arrived)]
        for agent in dict.fromkeys(write.endpoint.peer.agent for write in lost):
            self._lose(agent)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self.dead = True

    def end(self, write: Write, event: TransportEvent) -> None:
        if self.writes.pop(write.number, None):
            self._add(event)

    def hear(self, event: TransportEvent) -> None:
        if not self.dead:
            self._add(event)

    def break_off(self, peer: SimulatedTransport, *, gone: bool = True) -> None:
        """The connection to `peer` is broken; this side finds out when it uses it."""
        endpoint = self._peers.get(peer.agent)
        if endpoint is not None:
            endpoint.alive, endpoint.gone = False, gone
            if any(write.endpoint is endpoint for write in self.writes.values()):
                self.poke()

    def _lose(self, peer: str) -> None:
        endpoint = self._peers.pop(peer, None)
        self._add(PeerLost(peer, endpoint.gone if endpoint else True))
        for write in list(self.writes.values()):
            if write.endpoint.peer.agent == peer and not write.arrived:
                self.end(write, WriteFailed(write.number, WorkerLost(f"{peer} is lost")))
        if endpoint is not None:
            endpoint.alive = False

    def _add(self, event: TransportEvent) -> None:
        self._events.append(event)
        self.poke()


def _rows(cells: Sequence[int], rows: int, first: int, size: int) -> list[int]:
    """Of each row of cells, `size` from the `first` on."""
    length = len(cells) // rows
    return [cells[row * length + first + place] for row in range(rows) for place in range(size)]

"""A transport between workers of one process: a copy, and a queue of notes.

All agents of the process are in one table. A write holds the peer's lock while it
copies, so that the peer cannot close and free its memory meanwhile.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import uuid

import numpy
import numpy.typing

from baton.core.errors import Internal, InvalidConfig, WorkerLost
from baton.kv_transfer.transport import (
    Noted,
    PagePart,
    PageWrite,
    PeerLost,
    PoolMemory,
    TransportEvent,
    WriteDone,
    WriteFailed,
    check_page_size,
    check_pages,
    check_polled,
    pool_address,
)
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout

_AGENTS: dict[str, InProcessTransport] = {}


class InProcessTransport:
    """Serves a pool in CPU memory to the other agents of this process."""

    def __init__(self, agent: str = "") -> None:
        self.agent = agent or f"inprocess-{uuid.uuid4().hex}"
        self._numbers = itertools.count(1)
        self._memory: PoolMemory | None = None
        self._peers: dict[str, tuple[InProcessTransport, PagePart | None]] = {}
        self._events: list[TransportEvent] = []
        # Guards the memory and the events, which peers write to.
        self._lock = threading.Lock()

    def register(self, memory: PoolMemory, layout: PoolLayout) -> PoolAddress:
        if memory.device != "cpu":
            raise InvalidConfig(f"the in-process transport cannot serve {memory.device} memory")
        self._memory = memory
        _AGENTS[self.agent] = self
        return pool_address("inprocess", self.agent, b"", memory, layout)

    def connect(self, address: PoolAddress, part: PagePart | None = None) -> str:
        with self._lock:
            check_polled(self._events, address.agent)
        check_page_size(self._own_memory, address, part)
        peer = _AGENTS.get(address.agent)
        if peer is None:
            raise WorkerLost(f"no agent {address.agent} in this process")
        self._peers[address.agent] = peer, part
        return address.agent

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def write(self, write: PageWrite) -> int:
        if not write.ready:
            raise Internal("a copy between CPU pools cannot wait for a device")
        memory = self._own_memory
        if write.peer not in self._peers:
            raise WorkerLost(f"not connected to {write.peer}")
        target, part = self._peers[write.peer]
        number = next(self._numbers)
        if target._receive(self.agent, memory, part, write):
            self._append(WriteDone(number))
        else:
            self.disconnect(write.peer)
            self._append(PeerLost(write.peer))
            self._append(WriteFailed(number, WorkerLost(f"{write.peer} has closed")))
        return number

    def poll(self) -> list[TransportEvent]:
        with self._lock:
            events, self._events = self._events, []
        return events

    def close(self) -> None:
        _AGENTS.pop(self.agent, None)
        self._peers.clear()
        with self._lock:
            self._memory = None

    @property
    def _own_memory(self) -> PoolMemory:
        if self._memory is None:
            raise WorkerLost(f"{self.agent} serves no memory")
        return self._memory

    def _append(self, event: TransportEvent) -> None:
        with self._lock:
            self._events.append(event)

    def _receive(
        self, sender: str, source: PoolMemory, part: PagePart | None, write: PageWrite
    ) -> bool:
        """Called by a peer: copies its pages, queues its note. False when this agent is closed."""
        with self._lock:
            if self._memory is None:
                return False
            check_pages(write, source.total_pages, self._memory.total_pages)
            if write.local_pages:
                part = part or PagePart(1, source.page_bytes, 0, 0)
                found = _rows(source, part.rows)[:, :, part.local_offset :]
                into = _rows(self._memory, part.rows)[:, :, part.remote_offset :]
                for local, remote in zip(write.local_pages, write.remote_pages, strict=True):
                    into[remote, :, : part.row_bytes] = found[local, :, : part.row_bytes]
            if write.note:
                self._events.append(Noted(sender, write.note))
            return True


def _rows(memory: PoolMemory, rows: int) -> numpy.typing.NDArray[numpy.uint8]:
    """[page, row, byte]"""
    whole = memoryview((ctypes.c_uint8 * memory.size).from_address(memory.base)).cast("B")
    flat = numpy.frombuffer(whole, dtype=numpy.uint8)
    return flat.reshape(memory.total_pages, rows, -1)

"""A transport between workers of one process: a copy, and a queue of notes.

All agents of the process are in one table. A write holds the peer's lock while it
copies, so that the peer cannot close and free its memory meanwhile.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

import numpy
import numpy.typing

from baton.core.errors import Internal, WorkerLost
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

_AGENTS: dict[str, InProcessTransport] = {}


@dataclass(frozen=True, slots=True)
class _Peer:
    transport: InProcessTransport
    total_pages: int
    part: PagePart | None


class InProcessTransport(BaseTransport[_Peer]):
    """Serves a pool in CPU memory to the other agents of this process."""

    name = "inprocess"
    devices = ("cpu",)

    def __init__(self, agent: str = "") -> None:
        super().__init__(agent)
        # Guards the memory and the events, which peers write to.
        self._lock = threading.Lock()

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def poll(self) -> list[TransportEvent]:
        with self._lock:
            events, self._events = self._events, []
        return events

    def close(self) -> None:
        _AGENTS.pop(self.agent, None)
        self._peers.clear()
        with self._lock:
            self._memory = None

    def _open(self, memory: PoolMemory) -> bytes:
        _AGENTS[self.agent] = self
        return b""

    def _connect(self, address: PoolAddress, part: PagePart | None) -> _Peer:
        peer = _AGENTS.get(address.agent)
        if peer is None:
            raise WorkerLost(f"no agent {address.agent} in this process")
        return _Peer(peer, address.total_pages, part)

    def _write(self, write: PageWrite, peer: _Peer) -> None:
        if not write.ready:
            raise Internal("a copy between CPU pools cannot wait for a device")
        if peer.transport._receive(self.agent, self._registered, peer.part, write):
            self._add(WriteDone(write.number))
        else:
            self.disconnect(write.peer)
            lost = WorkerLost(f"{write.peer} has closed")
            self._add(PeerLost(write.peer), WriteFailed(write.number, lost))

    def _add(self, *events: TransportEvent) -> None:
        with self._lock:
            self._events += events

    def _receive(
        self, sender: str, source: PoolMemory, part: PagePart | None, write: PageWrite
    ) -> bool:
        """Called by a peer: copies its pages, queues its note. False when this agent is closed."""
        with self._lock:
            if self._memory is None:
                return False
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

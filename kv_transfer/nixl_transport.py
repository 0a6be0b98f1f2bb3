"""A transport over NIXL with its UCX backend: between processes and hosts, CPU or GPU memory.

What NIXL 1.5 does, and the consequences here:

- Its progress thread spins on a whole core, so it stays off; `poll` makes progress
  instead, at about 2 us.
- With a page list prepared once per peer, a transfer is made from page numbers
  alone, and NIXL merges neighbours. That takes 30 us for 64 pages, against 110 us
  from addresses.
- On CPU memory of one host `transfer` copies before it returns, without the GIL.
  A pool in huge pages is copied 1.4 times as fast.
- The note of a transfer is sent after its bytes have been flushed to the peer.
  A transfer without a note is done only then, too.
- Nothing cancels a transfer: neither releasing its handle nor removing the peer.
  A write ends when NIXL says so.
- On GPU memory a descriptor costs 11 us of CPU time, whatever its size. NIXL's
  threads share the descriptors of a large write and sleep between writes.
- The first message between two processes connects them, which takes several polls
  of both. So `connect` sends one.
- A part of a page takes a descriptor per row. Each costs 0.1 us to make and, between
  processes of a host, a system call of 2 us.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing

from baton.core.errors import BatonError, Internal, InvalidConfig, WorkerLost
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

_HELLO = b"\0"
_MEMORY_KINDS = {"cpu": "DRAM", "cuda": "VRAM"}

DEVICE_THREADS = {"cpu": 0, "cuda": 4}
"""Threads that share a write's descriptors. On CPU memory the copy itself dominates."""

SPLIT_DESCRIPTORS = 32
"""From this many descriptors on, threads share a write."""


@dataclass(frozen=True, slots=True)
class _Peer:
    memory: PoolMemory
    part: PagePart | None  # the part of its pages that is copied; None for all
    pages: Any  # NIXL's prepared list of its pages; None if a part is copied

    @property
    def total_pages(self) -> int:
        return self.memory.total_pages


@dataclass(frozen=True, slots=True)
class _Write:
    peer: str
    handle: Any  # NIXL's transfer


class NixlTransport(BaseTransport[_Peer]):
    """Serves one pool through one NIXL agent."""

    name = "nixl"
    devices = tuple(_MEMORY_KINDS)

    def __init__(self, agent: str = "", threads: int | None = None) -> None:
        """`threads` share the descriptors of a write; the default depends on the memory."""
        super().__init__(agent)
        self._threads = threads
        # NIXL's errors have no base class of their own. Known once NIXL is imported.
        self._errors: tuple[type[Exception], ...] = ()
        self._lost_errors: tuple[type[Exception], ...] = ()
        self._gone_errors: tuple[type[Exception], ...] = ()
        self._engine: Any = None  # the NIXL agent
        self._registration: Any = None
        self._own_pages: Any = None
        self._writes: dict[int, _Write] = {}
        self._held: dict[int, PageWrite] = {}  # their pages are not complete yet

    def _open(self, memory: PoolMemory) -> bytes:
        nixl = self._import_nixl()
        settings = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        with self._translated("register the pool"):
            self._engine = nixl.nixl_agent(self.agent, settings)
            self._engine.create_backend("UCX", self._backend_options(memory.device))
            whole_pool = (memory.base, memory.size, memory.device_id, "")
            kind = _MEMORY_KINDS[memory.device]
            self._registration = self._engine.register_memory([whole_pool], kind)
            self._own_pages = self._prepare("NIXL_INIT_AGENT", memory)
            metadata: bytes = self._engine.get_agent_metadata()
        return metadata

    def _connect(self, address: PoolAddress, part: PagePart | None) -> _Peer:
        peer, metadata = address.agent, self._metadata(address)
        pages = (address.base, address.page_bytes, address.total_pages)
        memory = PoolMemory(*pages, address.device, address.device_id)
        if memory.device not in _MEMORY_KINDS:
            raise InvalidConfig(f"NIXL cannot reach {memory.device!r} memory")
        with self._translated(f"connect to {peer}"):
            self._engine.add_remote_agent(metadata)
            prepared = self._prepare(peer, memory) if part is None else None
            self._engine.send_notif(peer, _HELLO)
        return _Peer(memory, part, prepared)

    def disconnect(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            with suppress(*self._errors):  # it may have removed itself when it broke
                if known.pages is not None:
                    known.pages.release()
                self._engine.remove_remote_agent(peer)

    def _write(self, write: PageWrite, peer: _Peer) -> None:
        if write.ready:
            self._try_start(write)
        else:
            self._held[write.number] = write

    def poll(self) -> list[TransportEvent]:
        for number in [number for number, order in self._held.items() if order.ready]:
            if order := self._held.pop(number, None):  # else it has just failed with its peer
                self._try_start(order)
        for number in list(self._writes):
            self._check(number)
        events, self._events = self._events, []
        for peer, notes in self._engine.get_new_notifs().items():
            events += [Noted(peer, note) for note in notes if note != _HELLO]
        return events

    def close(self) -> None:
        if self._engine is None:
            return
        for write in self._writes.values():
            self._release(write)
        self._writes.clear()
        self._held.clear()
        for peer in list(self._peers):
            self.disconnect(peer)
        if self._own_pages is not None:
            self._own_pages.release()
            self._engine.deregister_memory(self._registration)
        self._engine = self._memory = self._own_pages = self._registration = None

    def _import_nixl(self) -> Any:
        """Raises InvalidConfig if NIXL is missing."""
        try:
            nixl = importlib.import_module("nixl")
        except ImportError as error:
            raise InvalidConfig(f"the nixl transport needs NIXL: {error}") from error
        logging.getLogger("nixl").setLevel(logging.WARNING)  # its start-up messages
        self._errors = tuple(error for name, error in vars(nixl).items() if name.endswith("Error"))
        self._gone_errors = (nixl.nixlRemoteDisconnectError,)
        self._lost_errors = (
            *self._gone_errors,
            nixl.nixlNotFoundError,
            nixl.nixlBackendError,  # such as a refused connection
        )
        return nixl

    def _backend_options(self, device: str) -> dict[str, str]:
        threads = DEVICE_THREADS[device] if self._threads is None else self._threads
        if threads == 0:
            return {}
        return {"num_threads": str(threads), "split_batch_size": str(SPLIT_DESCRIPTORS)}

    def _prepare(self, owner: str, pool: PoolMemory) -> Any:
        """NIXL's list of a pool's pages, in the compressed form: one row for all of them."""
        row = [pool.base, pool.page_bytes, pool.device_id, pool.page_bytes, pool.total_pages]
        rows = numpy.array([row], dtype=numpy.uint64)
        return self._engine.prep_xfer_dlist(owner, rows, _MEMORY_KINDS[pool.device])

    def _try_start(self, order: PageWrite) -> None:
        try:
            with self._translated(f"write to {order.peer}"):
                self._start(order)
        except BatonError as error:
            self._fail(order.number, order.peer, error)

    def _start(self, order: PageWrite) -> None:
        if not order.local_pages:
            self._engine.send_notif(order.peer, order.note)
            self._events.append(WriteDone(order.number))
            return
        peer = self._peers[order.peer]
        make = self._make_transfer if peer.part is None else self._make_part_transfer
        handle = make(order, peer)
        self._writes[order.number] = _Write(order.peer, handle)
        self._settle(order.number, self._engine.transfer(handle))

    def _make_transfer(self, order: PageWrite, peer: _Peer) -> Any:
        return self._engine.make_prepped_xfer(
            "WRITE",
            self._own_pages,
            numpy.asarray(order.local_pages, dtype=numpy.int32),
            peer.pages,
            numpy.asarray(order.remote_pages, dtype=numpy.int32),
            order.note,
        )

    def _make_part_transfer(self, order: PageWrite, peer: _Peer) -> Any:
        own, part = self._registered, peer.part
        assert part is not None
        local = _descriptors(own, order.local_pages, part, part.local_offset)
        remote = _descriptors(peer.memory, order.remote_pages, part, part.remote_offset)
        return self._engine.initialize_xfer(
            "WRITE",
            self._engine.get_xfer_descs(local, _MEMORY_KINDS[own.device]),
            self._engine.get_xfer_descs(remote, _MEMORY_KINDS[peer.memory.device]),
            order.peer,
            order.note,
        )

    def _check(self, number: int) -> None:
        write = self._writes.get(number)
        if write is None:  # failed together with another write to the same peer
            return
        try:
            with self._translated(f"write to {write.peer}"):
                self._settle(number, self._engine.check_xfer_state(write.handle))
        except BatonError as error:
            self._fail(number, write.peer, error)

    def _settle(self, number: int, state: str) -> None:
        if state == "DONE":
            self._release(self._writes.pop(number))
            self._events.append(WriteDone(number))
        elif state != "PROC":
            raise Internal(f"a write to {self._writes[number].peer} ended in state {state}")

    def _fail(self, number: int, peer: str, error: BatonError) -> None:
        others = [other for other in self._writes if other != number]
        others = [other for other in others if self._writes[other].peer == peer]
        gone = isinstance(error.__cause__, self._gone_errors)
        # Other errors say nothing about the peer's other writes, which end by themselves.
        lost = isinstance(error, WorkerLost) and (gone or not others)
        if lost:
            self._events.append(PeerLost(peer, gone))
            others += [held for held in self._held if self._held[held].peer == peer]
        for each in [number, *others] if lost else [number]:
            self._held.pop(each, None)
            if each in self._writes:
                self._release(self._writes.pop(each))
            self._events.append(WriteFailed(each, error))
        if lost:
            self.disconnect(peer)

    def _release(self, write: _Write) -> None:
        with suppress(*self._errors):  # a broken transfer may refuse; the agent frees it later
            write.handle.release()

    @contextmanager
    def _translated(self, attempt: str) -> Iterator[None]:
        """Raises NIXL's errors as ours: WorkerLost when the peer is gone, else Internal."""
        try:
            yield
        except self._lost_errors as error:
            raise WorkerLost(f"could not {attempt}: {error}") from error
        except self._errors as error:
            raise Internal(f"could not {attempt}: {error}") from error


def _descriptors(
    memory: PoolMemory, pages: Sequence[int], part: PagePart, offset: int
) -> numpy.typing.NDArray[numpy.uint64]:
    """One (address, bytes, device) for the part of every row of these pages."""
    first_rows = numpy.asarray(pages, dtype=numpy.uint64)[:, None] * numpy.uint64(part.rows)
    rows = (first_rows + numpy.arange(part.rows, dtype=numpy.uint64)).ravel()
    descriptors = numpy.empty((len(rows), 3), dtype=numpy.uint64)
    descriptors[:, 0] = rows * numpy.uint64(memory.page_bytes // part.rows)
    descriptors[:, 0] += numpy.uint64(memory.base + offset)
    descriptors[:, 1] = part.row_bytes
    descriptors[:, 2] = memory.device_id
    return descriptors

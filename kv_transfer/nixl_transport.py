"""A transport over NIXL with its UCX backend: between processes and hosts, CPU or GPU memory.

What NIXL 1.5 does, and what follows from it here:

- Its progress thread spins on a whole core. It stays off; `poll` makes the
  progress instead, and costs about 2 us.
- A list of pages prepared once per peer lets a transfer be made from page
  numbers alone, and NIXL merges neighbours itself. Making one takes 30 us for
  64 pages, against 110 us from addresses.
- On CPU memory of the same host `transfer` copies before it returns. It lets
  other Python threads run meanwhile. A pool in huge pages is copied 1.4 times
  as fast.
- The note of a transfer leaves after its bytes have been flushed to the peer.
- Nothing withdraws a transfer: not releasing its handle, not removing the
  peer. A write ends when NIXL says so.
- On GPU memory a descriptor costs 11 us of a CPU's time, whatever its size.
  Threads of NIXL's share the descriptors of a large write; they sleep
  between writes.
- Two processes are wired up by the first message between them, which takes
  both of them several polls. So `connect` sends one.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy

from baton.v1.transfer_pb2 import PoolAddress, PoolLayout
from core.errors import BatonError, Internal, InvalidConfig, WorkerLost
from core.types import Moment
from kv_transfer.transport import (
    Noted,
    PeerLost,
    PoolMemory,
    TransportEvent,
    WriteDone,
    WriteFailed,
    check_page_size,
    check_pages,
    check_told,
    pool_address,
    route_metadata,
)

_GREETING = b"\0"
_MEMORY_KINDS = {"cpu": "DRAM", "cuda": "VRAM"}

DEVICE_THREADS = {"cpu": 0, "cuda": 4}
"""Threads that share a write's descriptors. On CPU memory the copy itself is the cost."""

SPLIT_DESCRIPTORS = 32
"""From how many descriptors on a write is shared out."""


@dataclass(frozen=True, slots=True)
class _Peer:
    total_pages: int
    pages: Any  # NIXL's prepared list of the peer's pages


@dataclass(frozen=True, slots=True)
class _Write:
    peer: str
    handle: Any  # NIXL's transfer


@dataclass(frozen=True, slots=True)
class _Order:
    """A write that is yet to start."""

    peer: str
    local_pages: Sequence[int]
    remote_pages: Sequence[int]
    note: bytes
    after: Moment | None  # until when its pages are still being made

    @property
    def may_start(self) -> bool:
        return self.after is None or self.after.query()


class NixlTransport:
    """Serves one pool through one NIXL agent."""

    def __init__(self, agent: str = "", threads: int | None = None) -> None:
        """`threads` share the descriptors of a write; unset takes what suits the memory."""
        self.agent = agent or f"nixl-{uuid.uuid4().hex}"
        self._threads = threads
        # NIXL's errors have no base class of their own. Known once NIXL is imported.
        self._errors: tuple[type[Exception], ...] = ()
        self._lost_errors: tuple[type[Exception], ...] = ()
        self._gone_errors: tuple[type[Exception], ...] = ()
        self._engine: Any = None  # the NIXL agent
        self._memory: PoolMemory | None = None
        self._registration: Any = None
        self._own_pages: Any = None
        self._peers: dict[str, _Peer] = {}
        self._writes: dict[int, _Write] = {}
        self._held: dict[int, _Order] = {}
        self._numbers = itertools.count(1)
        self._events: list[TransportEvent] = []

    def register(self, memory: PoolMemory, layout: PoolLayout) -> PoolAddress:
        kind = _memory_kind(memory.device)
        nixl = self._import_nixl()
        settings = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        with self._translated("register the pool"):
            self._engine = nixl.nixl_agent(self.agent, settings)
            self._engine.create_backend("UCX", self._backend_options(memory.device))
            whole_pool = (memory.base, memory.size, memory.device_id, "")
            self._registration = self._engine.register_memory([whole_pool], kind)
            own = (memory.base, memory.page_bytes, memory.total_pages, memory.device_id)
            self._own_pages = self._prepare("NIXL_INIT_AGENT", kind, *own)
            metadata = self._engine.get_agent_metadata()
        self._memory = memory
        return pool_address("nixl", self.agent, metadata, memory, layout)

    def connect(self, address: PoolAddress) -> str:
        peer = address.agent
        if peer in self._peers:
            return peer
        check_told(self._events, peer)
        check_page_size(self._own_memory, address)
        metadata = route_metadata(address, "nixl")
        pages = (address.base, address.page_bytes, address.total_pages, address.device_id)
        with self._translated(f"connect to {peer}"):
            self._engine.add_remote_agent(metadata)
            prepared = self._prepare(peer, _memory_kind(address.device), *pages)
            self._engine.send_notif(peer, _GREETING)
        self._peers[peer] = _Peer(address.total_pages, prepared)
        return peer

    def disconnect(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            with suppress(*self._errors):  # it may have removed itself when it broke off
                known.pages.release()
                self._engine.remove_remote_agent(peer)

    def write(
        self,
        peer: str,
        local_pages: Sequence[int],
        remote_pages: Sequence[int],
        note: bytes = b"",
        after: Moment | None = None,
    ) -> int:
        known = self._peers.get(peer)
        if known is None:
            raise WorkerLost(f"not connected to {peer}")
        check_pages(local_pages, self._own_memory.total_pages, remote_pages, known.total_pages)
        number = next(self._numbers)
        order = _Order(peer, local_pages, remote_pages, note, after)
        if order.may_start:
            self._try_start(number, order)
        else:
            self._held[number] = order
        return number

    def poll(self) -> list[TransportEvent]:
        for number in [number for number, order in self._held.items() if order.may_start]:
            if order := self._held.pop(number, None):  # else it failed with its peer just now
                self._try_start(number, order)
        for number in list(self._writes):
            self._check(number)
        events, self._events = self._events, []
        for peer, notes in self._engine.get_new_notifs().items():
            events += [Noted(peer, note) for note in notes if note != _GREETING]
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

    @property
    def _own_memory(self) -> PoolMemory:
        if self._memory is None:
            raise Internal(f"{self.agent} serves no memory")
        return self._memory

    def _import_nixl(self) -> Any:
        nixl = _import_nixl()
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

    def _prepare(
        self, owner: str, kind: str, base: int, page_bytes: int, total_pages: int, device_id: int
    ) -> Any:
        """NIXL's list of a pool's pages, in the compressed form: one row for all of them."""
        row = [base, page_bytes, device_id, page_bytes, total_pages]
        return self._engine.prep_xfer_dlist(owner, numpy.array([row], dtype=numpy.uint64), kind)

    def _try_start(self, number: int, order: _Order) -> None:
        try:
            with self._translated(f"write to {order.peer}"):
                self._start(number, order)
        except BatonError as error:
            self._fail(number, order.peer, error)

    def _start(self, number: int, order: _Order) -> None:
        if not order.local_pages:
            self._engine.send_notif(order.peer, order.note)
            self._events.append(WriteDone(number))
            return
        handle = self._engine.make_prepped_xfer(
            "WRITE",
            self._own_pages,
            numpy.asarray(order.local_pages, dtype=numpy.int32),
            self._peers[order.peer].pages,
            numpy.asarray(order.remote_pages, dtype=numpy.int32),
            order.note,
        )
        self._writes[number] = _Write(order.peer, handle)
        self._settle(number, self._engine.transfer(handle))

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
        # Any other error says nothing about the peer's other writes, which end by themselves.
        lost = isinstance(error, WorkerLost) and (gone or not others)
        if lost:
            self._events.append(PeerLost(peer, gone))
        if lost:
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


def _import_nixl() -> Any:
    """NIXL, with its notes on every start-up step silenced. Without NIXL: InvalidConfig."""
    try:
        nixl = importlib.import_module("nixl")
    except ImportError as error:
        raise InvalidConfig(f"the nixl transport needs NIXL, which is missing: {error}") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return nixl


def _memory_kind(device: str) -> str:
    kind = _MEMORY_KINDS.get(device)
    if kind is None:
        raise InvalidConfig(f"NIXL cannot reach {device!r} memory")
    return kind

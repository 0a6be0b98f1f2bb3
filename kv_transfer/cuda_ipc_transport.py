"""A transport between workers of one host whose pools are on GPUs: one kernel per write.

`connect` maps the peer's pool into this process once. A write is then one
kernel that copies all its pages, on the transport's own stream; notes go over a
local socket.

A write's life:

    write ──▶ the copy runs ──▶ its event has passed ──▶ the note is sent ──▶ WriteDone
                                        │
                                        └──▶ the peer has gone ──▶ WriteFailed

- A copy of pages that the engine is still computing is launched at once; the GPU
  starts it when they are complete, without the host.
- The note is sent only after the event: the bytes are then visible to every later
  kernel, on any stream and in any process.
- A lost peer is detected at once, by its socket. A running copy into its memory cannot
  be stopped, and need not be: the mapping keeps the memory allocated until it is
  closed, after the last copy's event.
- A peer's own last copies may still run when its socket closes: a killed process
  loses its GPU after its files. It counts as gone a second later.
- Within one process nothing is mapped.
- Two GPUs of a host can use it where one can reach the other's memory, also where
  the other GPU is hidden from this process.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from baton.core.errors import Internal, InvalidConfig, WorkerLost
from baton.core.types import DeviceEvent
from baton.kernels.gpu.pages import copy_pages, copy_rows
from baton.kv_transfer.note_socket import NoteSocket
from baton.kv_transfer.transport import (
    BaseTransport,
    PagePart,
    PageWrite,
    PeerLost,
    PoolMemory,
    TransportEvent,
    WriteDone,
    WriteFailed,
)
from baton.v1.transfer_pb2 import CudaIpcRoute, PoolAddress

AFTERMATH_SECONDS = 1.0
"""How long copies may run after their process has ended: they take milliseconds."""

_DRIVER = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESS = uuid.uuid4().hex


@dataclass(slots=True)
class _Peer:
    agent: str
    base: int  # the address of its page 0 in this process
    page_bytes: int
    total_pages: int
    mapping: int | None  # to unmap when it is lost; None within one process
    part: PagePart | None = None  # the part of its pages that is copied; None for all
    gone: bool = False


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy under way."""

    copied: torch.cuda.Event
    page_ids: tuple[Tensor, Tensor]  # read by the kernel while it runs

    @property
    def is_over(self) -> bool:
        return bool(self.copied.query())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Write:
    peer: _Peer
    note: bytes
    copy: _Copy | None  # None when there is only a note


class CudaIpcTransport(BaseTransport[_Peer]):
    """Serves one pool on a GPU to the other workers of the host."""

    name = "cuda_ipc"
    devices = ("cuda",)

    def __init__(self, agent: str = "") -> None:
        super().__init__(agent)
        self._notes: NoteSocket | None = None
        self._writes: dict[int, _Write] = {}
        self._ended: dict[str, float] = {}  # when lost peers will count as gone

    def _open(self, memory: PoolMemory) -> bytes:
        torch.cuda.set_device(memory.device_id)
        self._device = torch.device("cuda", memory.device_id)
        # High priority, so that ready pages do not wait for the engine's kernels.
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        # For copies that wait for the engine, so that ready pages do not queue behind them.
        self._later = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        shared = _share(memory)
        self._warm_up(memory)
        self._notes = NoteSocket(self.agent)
        return CudaIpcRoute(
            host=host_identity(),
            process=_process_identity(),
            gpu=_gpu_uuid(memory.device_id),
            handle=shared.handle,
            offset=shared.offset,
            socket=self._notes.name,
        ).SerializeToString()

    def _connect(self, address: PoolAddress, part: PagePart | None) -> _Peer:
        peer, route = address.agent, self._route(address)
        _check_reach(route, peer, self._registered.device_id)
        self._open_notes.connect(peer, route.socket)
        try:
            known = _map_peer(route, address, part)
        except WorkerLost:
            self._open_notes.disconnect(peer)
            raise
        self._ended.pop(peer, None)
        return known

    def _route(self, address: PoolAddress) -> CudaIpcRoute:
        try:
            return CudaIpcRoute.FromString(self._metadata(address))
        except DecodeError as error:
            raise WorkerLost(f"{address.agent} sent no CUDA IPC route: {error}") from error

    def disconnect(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is not None and self._notes is not None:
            self._notes.disconnect(peer)
            known.gone = True
            self._unmap_when_idle(known)

    def _write(self, write: PageWrite, peer: _Peer) -> None:
        if self._open_notes.alive(write.peer):
            pages = write.local_pages, write.remote_pages
            copy = self._copy(self._registered, peer, *pages, write.after) if pages[0] else None
            self._writes[write.number] = _Write(peer, write.note, copy)
        else:
            self._lose(write.peer)
            lost = WorkerLost(f"{write.peer} has gone")
            self._events.append(WriteFailed(write.number, lost))

    def poll(self) -> list[TransportEvent]:
        notes = self._open_notes
        received, gone = notes.poll()
        for peer in gone:
            self._lose(peer)
        for number in list(self._writes):
            self._settle(number, notes)
        for peer in [peer for peer, at in self._ended.items() if time.monotonic() >= at]:
            del self._ended[peer]
            self._events.append(PeerLost(peer, gone=True))
        events, self._events = self._events, []
        return [*events, *received]

    def close(self) -> None:
        if self._notes is None:
            return
        self._stream.synchronize()
        self._later.synchronize()
        self._writes.clear()
        for peer in list(self._peers):
            self.disconnect(peer)
        self._notes.close()
        self._notes = self._memory = None

    @property
    def _open_notes(self) -> NoteSocket:
        if self._notes is None:
            raise Internal(f"{self.agent} serves no memory")
        return self._notes

    def _warm_up(self, memory: PoolMemory) -> None:
        """Compiles the kernel before the first write."""
        scratch = torch.zeros(2 * memory.page_bytes, dtype=torch.uint8, device=self._device)
        torch.cuda.current_stream().synchronize()
        own = dataclasses.replace(memory, base=scratch.data_ptr())
        loop = _Peer(self.agent, own.base, own.page_bytes, 2, None)
        self._copy(own, loop, [0], [1]).copied.synchronize()

    def _copy(
        self,
        own: PoolMemory,
        peer: _Peer,
        local_pages: Sequence[int],
        remote_pages: Sequence[int],
        after: DeviceEvent | None = None,
    ) -> _Copy:
        count = len(local_pages)
        stream = self._stream if after is None else self._later
        # Both lists begin at multiples of 16 bytes; otherwise the kernel is compiled again.
        page_ids = torch.empty((2, count + count % 2), dtype=torch.int64, pin_memory=True)
        page_ids[:, :count] = torch.tensor([list(local_pages), list(remote_pages)])
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            local, remote = page_ids.to(self._device, non_blocking=True)[:, :count]
            if isinstance(after, torch.cuda.Event):  # on a GPU every DeviceEvent is one
                stream.wait_event(after)
            _launch(own, peer, local, remote)
            copied.record(stream)
        return _Copy(copied, (local, remote))

    def _settle(self, number: int, notes: NoteSocket) -> None:
        """Ends a write if its copy is done and its note is sent."""
        write = self._writes[number]
        if write.copy is not None and not write.copy.is_over:
            return
        try:
            if not self._send_note(write, notes):
                return
        except WorkerLost as error:
            self._lose(write.peer.agent)
            self._events.append(WriteFailed(number, error))
        else:
            self._events.append(WriteDone(number))
        del self._writes[number]
        self._unmap_when_idle(write.peer)

    def _send_note(self, write: _Write, notes: NoteSocket) -> bool:
        """Sends the write's note, if it has one. True once it is sent."""
        if write.peer.gone:
            raise WorkerLost(f"{write.peer.agent} has gone")
        return not write.note or notes.send(write.peer.agent, write.note)

    def _lose(self, peer: str) -> None:
        if peer in self._peers:
            self._events.append(PeerLost(peer, gone=False))
            self._ended[peer] = time.monotonic() + AFTERMATH_SECONDS
            self.disconnect(peer)

    def _unmap_when_idle(self, peer: _Peer) -> None:
        busy = any(write.peer is peer for write in self._writes.values())
        if peer.gone and not busy and peer.mapping is not None:
            _unmap_shared(peer.mapping)
            peer.mapping = None


def _share(memory: PoolMemory) -> _SharedMemory:
    try:
        return _share_memory(memory.base)
    except _DriverError as error:
        raise InvalidConfig(
            f"the pool's memory cannot be shared with other processes: {error}; torch must"
            " allocate it with cudaMalloc, so without expandable_segments and cudaMallocAsync"
        ) from error


def _launch(own: PoolMemory, peer: _Peer, local: Tensor, remote: Tensor) -> None:
    """Starts the copy of pages local [n] to remote [n], or of the peer's part of each."""
    part = peer.part
    if part is None:
        copy_pages(own.base, peer.base, own.page_bytes, local, remote)
        return
    rows = torch.arange(part.rows, device=local.device)
    copy_rows(
        own.base + part.local_offset,
        peer.base + part.remote_offset,
        part.row_bytes,
        (own.page_bytes // part.rows, peer.page_bytes // part.rows),
        (local[:, None] * part.rows + rows).flatten(),
        (remote[:, None] * part.rows + rows).flatten(),
    )


def _map_peer(route: CudaIpcRoute, address: PoolAddress, part: PagePart | None) -> _Peer:
    pages = address.page_bytes, address.total_pages
    if route.process == _process_identity():
        return _Peer(address.agent, address.base, *pages, None, part)
    try:
        base = _map_shared(route.handle)
    except _DriverError as error:
        raise WorkerLost(f"the memory of {address.agent} cannot be mapped: {error}") from error
    return _Peer(address.agent, base + route.offset, *pages, base, part)


def _check_reach(route: CudaIpcRoute, peer: str, device_id: int) -> None:
    """Raises WorkerLost when the peer's memory is known to be out of reach."""
    if route.host != host_identity():
        raise WorkerLost(f"{peer} is on another host")
    visible = [_gpu_uuid(index) for index in range(torch.cuda.device_count())]
    if route.gpu not in visible:
        return  # Ray hides the GPUs of other workers; the driver checks when it maps them
    other = visible.index(route.gpu)
    if other != device_id and not torch.cuda.can_device_access_peer(device_id, other):
        raise WorkerLost(f"GPU {device_id} cannot reach the memory of GPU {other}, where {peer} is")


def host_identity() -> str:
    """Equal for all processes of a host, in any container, until its next boot."""
    return _BOOT_ID.read_text().strip()


def _process_identity() -> str:
    # The pid distinguishes a forked child from its parent.
    return f"{_PROCESS}-{os.getpid()}"


def _gpu_uuid(device_id: int) -> str:
    return str(torch.cuda.get_device_properties(device_id).uuid)


# Memory shared through the driver's own library, which works with any build of torch. The
# calling thread must have a CUDA context: from `torch.cuda.set_device` and its first stream.


class _DriverError(Exception):
    """An error of the CUDA driver, with its message."""


class _SharedMemory(NamedTuple):
    """How another process maps some memory."""

    handle: bytes  # of the whole allocation
    offset: int  # where in it the memory begins


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def _share_memory(address: int) -> _SharedMemory:
    """Shares the allocation that contains `address`, with whatever else torch has in it."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call(
        "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    )
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return _SharedMemory(bytes(handle), address - base.value)


def _map_shared(handle: bytes) -> int:
    """The address, in this process, of an allocation that another process shares."""
    if len(handle) != ctypes.sizeof(_Handle):
        raise _DriverError(f"a handle cannot have {len(handle)} bytes")
    base = ctypes.c_uint64()
    _call(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(base),
        _Handle.from_buffer_copy(handle),
        ctypes.c_uint(_LAZY_PEER_ACCESS),
    )
    return base.value


def _unmap_shared(base: int) -> None:
    """Undoes `_map_shared`. No kernel may use the memory any more."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(base))


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise _DriverError(f"there is no CUDA driver: {error}") from error


def _call(name: str, *arguments: object) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        message = text.value.decode() if text.value else "unknown error"
        raise _DriverError(f"{name}: {message} ({code})")

"""Pools of memory and their transports, for suites that every transport passes.

A kind is a transport and the memory it serves. On a machine without a GPU only
the kinds of CPU memory exist; NIXL's only where NIXL is installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Protocol

import numpy
import numpy.typing
import torch
from inprocess_transport import InProcessTransport

from baton.kv_transfer.nixl_transport import NixlTransport
from baton.kv_transfer.pool_layout import HeadRange, choose_digest
from baton.kv_transfer.routed_transport import choose_transport
from baton.kv_transfer.shard_process import ShardProxy, serve_shard
from baton.kv_transfer.sharded_transport import ShardedTransport
from baton.kv_transfer.transport import PoolMemory, SlicingTransport, Transport, TransportEvent
from baton.v1.transfer_pb2 import PoolLayout

PAGE_BYTES = 4096
PAGES = 64
HEADS = 4
LAYOUT = PoolLayout(
    version=1,
    model="test",
    dtype="float32",
    page_size=16,
    layers=1,
    kv_heads=HEADS,
    head_dim=8,
)
ROWS = 2 * LAYOUT.page_size * LAYOUT.layers
"""Of a page: one a token, of keys and of values."""
UNTOUCHED = 0xEE

CUDA = torch.cuda.is_available()
NIXL = importlib.util.find_spec("nixl") is not None


class Bytes(Protocol):
    """Memory on some device, read and written from the host."""

    base: int
    device: str

    def read(self, start: int, size: int) -> bytes: ...

    def fill(self, start: int, size: int, value: int) -> None: ...

    def write(self, start: int, value: bytes) -> None: ...


class CpuBytes:
    """Plain memory, every byte `value`."""

    device = "cpu"

    def __init__(self, size: int, value: int = 0) -> None:
        self._buffer = ctypes.create_string_buffer(bytes([value]) * size)
        self.base = ctypes.addressof(self._buffer)

    def read(self, start: int, size: int) -> bytes:
        return ctypes.string_at(self.base + start, size)

    def fill(self, start: int, size: int, value: int) -> None:
        self.write(start, bytes([value]) * size)

    def write(self, start: int, value: bytes) -> None:
        assert 0 <= start <= len(self._buffer) - len(value)
        ctypes.memmove(self.base + start, value, len(value))


class CudaBytes:
    """Memory of the GPU, every byte `value`. What is written is there when `write` returns."""

    device = "cuda"

    def __init__(self, size: int, value: int = 0) -> None:
        self._tensor = torch.full((size,), value, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        self.base = self._tensor.data_ptr()

    def read(self, start: int, size: int) -> bytes:
        return bytes(self._tensor[start : start + size].cpu().numpy())

    def fill(self, start: int, size: int, value: int) -> None:
        self.fill_later(start, size, value)
        torch.cuda.synchronize()

    def write(self, start: int, value: bytes) -> None:
        written = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        self._tensor[start : start + len(value)] = written.to("cuda")
        torch.cuda.synchronize()

    def fill_later(self, start: int, size: int, value: int) -> None:
        """In the order of the current stream."""
        self._tensor[start : start + size] = value


@dataclass(frozen=True)
class Kind:
    """A transport on a device's memory."""

    name: str
    make_transport: Callable[[], SlicingTransport]
    make_bytes: Callable[[int, int], Bytes]
    spans_processes: bool = True

    def make_memory(self, memory: Bytes, page_bytes: int, pages: int) -> PoolMemory:
        return PoolMemory(memory.base, page_bytes, pages, memory.device)


def _cuda_ipc() -> SlicingTransport:
    from baton.kv_transfer.cuda_ipc_transport import CudaIpcTransport

    return CudaIpcTransport()


ALL_KINDS = (
    Kind("inprocess-cpu", InProcessTransport, CpuBytes, spans_processes=False),
    Kind("nixl-cpu", NixlTransport, CpuBytes),
    Kind("cuda_ipc-cuda", _cuda_ipc, CudaBytes),
    Kind("nixl-cuda", NixlTransport, CudaBytes),
    Kind("auto-cpu", partial(choose_transport, "auto", "cpu"), CpuBytes),
    Kind("auto-cuda", partial(choose_transport, "auto", "cuda"), CudaBytes),
)

_NEED_NIXL = ("nixl-cpu", "nixl-cuda", "auto-cpu")

KINDS = {
    kind.name: kind
    for kind in ALL_KINDS
    if (CUDA or "cuda" not in kind.name) and (NIXL or kind.name not in _NEED_NIXL)
}
"""What this machine has."""


class Pool:
    """A registered pool of a kind, every byte UNTOUCHED."""

    def __init__(self, kind: str, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self.bytes = KINDS[kind].make_bytes(page_bytes * PAGES, UNTOUCHED)
        self.memory = KINDS[kind].make_memory(self.bytes, page_bytes, PAGES)
        self.transport: Transport = KINDS[kind].make_transport()
        self.address = self.transport.register(self.memory, LAYOUT)
        self.events: list[TransportEvent] = []

    def page(self, index: int) -> bytes:
        return self.bytes.read(index * self.page_bytes, self.page_bytes)

    def set_page(self, index: int, value: bytes) -> None:
        self.bytes.write(index * self.page_bytes, value)

    def fill(self, index: int, value: int) -> None:
        self.set_page(index, bytes([value]) * self.page_bytes)


class SplitPool(Pool):
    """A pool whose heads are split evenly into shards.

    Each shard but the first is driven through a socket, as from another process.
    """

    def __init__(
        self, kind: str, shards: int, page_bytes: int = PAGE_BYTES, *, registered: bool = True
    ) -> None:
        self.page_bytes = page_bytes
        self.shards = [Shard(kind, rank, shards, page_bytes) for rank in range(shards)]
        own, *others = self.shards
        self.proxies = [ShardProxy(Connection(shard.serve().detach())) for shard in others]
        digest = choose_digest("auto", own.memory)
        self.sharded = ShardedTransport(own.transport, own.heads, self.proxies, digest)
        self.transport = self.sharded
        self.memory = own.memory
        if registered:
            self.address = self.transport.register(own.memory, LAYOUT)
        self.events = []

    def page(self, index: int) -> bytes:
        rows = [shard.rows(index) for shard in self.shards]  # of each, [row, bytes]
        return numpy.concatenate(rows, axis=1).tobytes()

    def set_page(self, index: int, value: bytes) -> None:
        whole = numpy.frombuffer(value, numpy.uint8).reshape(ROWS, len(self.shards), -1)
        for rank, shard in enumerate(self.shards):
            shard.bytes.write(index * shard.memory.page_bytes, whole[:, rank].tobytes())

    def close(self) -> None:
        self.transport.close()
        for shard in self.shards:
            shard.join()


class Shard:
    """Some heads of a pool and their transport."""

    def __init__(self, kind: str, rank: int, shards: int, page_bytes: int = PAGE_BYTES) -> None:
        own_bytes = page_bytes // shards
        self.heads = HeadRange(rank * HEADS // shards, HEADS // shards)
        self.bytes = KINDS[kind].make_bytes(own_bytes * PAGES, UNTOUCHED)
        self.memory = KINDS[kind].make_memory(self.bytes, own_bytes, PAGES)
        self.transport = KINDS[kind].make_transport()
        self._thread: threading.Thread | None = None

    def rows(self, page: int) -> numpy.typing.NDArray[numpy.uint8]:
        size = self.memory.page_bytes
        return numpy.frombuffer(self.bytes.read(page * size, size), numpy.uint8).reshape(ROWS, -1)

    def serve(self) -> socket.socket:
        """Serves the shard on a thread; returns the socket that drives it."""
        here, there = socket.socketpair()
        arguments = (Connection(there.detach()), self.transport, self.memory, self.heads)
        self._thread = threading.Thread(target=serve_shard, args=arguments, daemon=True)
        self._thread.start()
        return here

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(10)

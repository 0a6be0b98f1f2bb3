"""Pools of memory and the transports that serve them, for suites that hold for each of them.

A kind is a transport and the memory it serves. On a machine without a GPU only
the kinds of CPU memory exist; NIXL's only where NIXL is installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from baton.v1.transfer_pb2 import PoolLayout
from kv_transfer.choose import choose_transport
from kv_transfer.inprocess import InProcessTransport
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.transport import PoolMemory, Transport, TransportEvent

PAGE_BYTES = 4096
PAGES = 64
LAYOUT = PoolLayout(version=1, model="test", dtype="float32", page_size=16, layers=1)
UNTOUCHED = 0xEE

CUDA = torch.cuda.is_available()
NIXL = importlib.util.find_spec("nixl") is not None


class Bytes(Protocol):
    """Memory on some device, read and written from the host."""

    base: int
    device: str

    def read(self, start: int, size: int) -> bytes: ...

    def fill(self, start: int, size: int, value: int) -> None: ...


class CpuBytes:
    """Plain memory, every byte `value`."""

    device = "cpu"

    def __init__(self, size: int, value: int = 0) -> None:
        self._buffer = ctypes.create_string_buffer(bytes([value]) * size)
        self.base = ctypes.addressof(self._buffer)

    def read(self, start: int, size: int) -> bytes:
        return self._buffer.raw[start : start + size]

    def fill(self, start: int, size: int, value: int) -> None:
        self._buffer[start : start + size] = bytes([value]) * size


class CudaBytes:
    """Memory of the GPU, every byte `value`. What is filled is there when `fill` returns."""

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

    def fill_later(self, start: int, size: int, value: int) -> None:
        """In the order of the current stream."""
        self._tensor[start : start + size] = value


@dataclass(frozen=True)
class Kind:
    """A transport on a device's memory."""

    name: str
    make_transport: Callable[[], Transport]
    make_bytes: Callable[[int, int], Bytes]
    spans_processes: bool = True

    def make_memory(self, memory: Bytes, page_bytes: int, pages: int) -> PoolMemory:
        return PoolMemory(memory.base, page_bytes, pages, memory.device)


def _cuda_ipc() -> Transport:
    from kv_transfer.cuda_ipc_transport import CudaIpcTransport

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
        self.transport = KINDS[kind].make_transport()
        self.address = self.transport.register(self.memory, LAYOUT)
        self.events: list[TransportEvent] = []

    def page(self, index: int) -> bytes:
        return self.bytes.read(index * self.page_bytes, self.page_bytes)

    def fill(self, index: int, value: int) -> None:
        self.bytes.fill(index * self.page_bytes, self.page_bytes, value)

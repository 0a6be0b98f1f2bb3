"""Copies pages between a pool and rows of host memory.

If several ranks share a worker's model, a row is memory that all of them map:

    a row   [rank, bytes]: a whole page, as the heads of rank 0, then those of rank 1, …

Rank 0 decides which page goes to which row and tells the others over sockets; each rank copies
its own heads. Only rank 0 reads or writes whole rows, for files.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Protocol

import numpy
import numpy.typing
import torch
from torch import Tensor

from baton.core.errors import InvalidConfig
from baton.engine.architecture import Split

Move = tuple[int, int]
"""A page and a row."""
PageBytes = numpy.typing.NDArray[numpy.uint8]


class PageMemory(Protocol):
    """Copies between a pool's pages and rows. Each direction may run on its own thread, beside the
    engine's."""

    @property
    def staging(self) -> int:
        """The row after the requested ones, through which pages come from files."""

    def row(self, row: int) -> PageBytes: ...

    def copy(self, moves: Sequence[Move], *, restore: bool = False) -> None:
        """Copies pages into rows, or back to restore them. Returns when the bytes are there."""


def page_memory(kv: Tensor, rows: int, room: PageBytes | None = None) -> PageMemory:
    """Memory for the pool `kv` [page, ...]: `rows` rows and the staging row, in `room`
    [rows + 1, bytes] if given."""
    try:
        if room is None:
            room = numpy.empty((rows + 1, kv[0].nbytes), numpy.uint8)
        return CpuMemory(kv, room) if kv.device.type == "cpu" else CudaMemory(kv, room)
    except (MemoryError, RuntimeError) as error:
        raise InvalidConfig(
            f"no host memory for {rows} pages: {error}", field="cache.host_memory"
        ) from error


class CpuMemory:
    """For a pool in host memory. Copies use one core and release Python's lock."""

    def __init__(self, kv: Tensor, room: PageBytes) -> None:
        self._pages: PageBytes = _bytes_of(kv).numpy()  # [page, bytes]
        self._rows = room
        self.staging = len(room) - 1

    def row(self, row: int) -> PageBytes:
        found: PageBytes = self._rows[row]
        return found

    def copy(self, moves: Sequence[Move], *, restore: bool = False) -> None:
        for page, row in moves:
            if restore:
                self._pages[page] = self._rows[row]
            else:
                self._rows[row] = self._pages[page]


class CudaMemory:
    """For a pool on a GPU: page-locked rows, and a stream for each direction beside the steps."""

    def __init__(self, kv: Tensor, room: PageBytes) -> None:
        self._pages = _bytes_of(kv)
        # Locked in place: torch's own page-locked memory comes in powers of two.
        self._rows = torch.from_numpy(room)
        _lock(self._rows)
        self._saving = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]
        self._restoring = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]
        self.staging = len(room) - 1

    def row(self, row: int) -> PageBytes:
        return self._rows[row].numpy()

    def copy(self, moves: Sequence[Move], *, restore: bool = False) -> None:
        stream = self._restoring if restore else self._saving
        with torch.cuda.stream(stream):
            for page, row in moves:
                ends = (self._pages[page], self._rows[row])
                target, source = ends if restore else ends[::-1]
                target.copy_(source, non_blocking=True)
        stream.synchronize()


class RankMemory:
    """Rank 0's memory: all ranks copy, one order after the other."""

    def __init__(self, own: PageMemory, room: PageBytes, others: Sequence[Connection]) -> None:
        """room [rows + 1, bytes of a whole page]."""
        self._own = own
        self._room = room
        self._others = others
        self._turn = threading.Lock()
        self.staging = own.staging

    def row(self, row: int) -> PageBytes:
        found: PageBytes = self._room[row]
        return found

    def copy(self, moves: Sequence[Move], *, restore: bool = False) -> None:
        with self._turn:
            for other in self._others:
                other.send((moves, restore))
            self._own.copy(moves, restore=restore)
            for other in self._others:
                other.recv()


def share_rows(
    kv: Tensor, split: Split, rows: int, file: int, others: Sequence[Connection]
) -> RankMemory:
    """Called on rank 0: allocates rows for the pool `kv` [page, ...] in the empty memory file
    `file`, which all ranks have, and lets the others map them."""
    os.ftruncate(file, (rows + 1) * split.size * kv[0].nbytes)
    for other in others:
        other.send("rows")
    room = _map_rows(file, kv, split)
    own = page_memory(kv, rows, room[:, split.rank])
    return RankMemory(own, room.reshape(rows + 1, -1), others)


def follow_copies(kv: Tensor, split: Split, file: int, first: Connection) -> None:
    """Called on other ranks: copies as rank 0 orders, until the connection `first` ends."""
    first.recv()
    room = _map_rows(file, kv, split)
    memory = page_memory(kv, len(room) - 1, room[:, split.rank])
    while True:
        moves, restore = first.recv()
        memory.copy(moves, restore=restore)
        first.send("done")


def _map_rows(file: int, kv: Tensor, split: Split) -> PageBytes:
    """[rows + 1, rank, bytes], in memory that all ranks share."""
    mapped = mmap.mmap(file, 0)
    return numpy.frombuffer(mapped, numpy.uint8).reshape(-1, split.size, kv[0].nbytes)


def _lock(memory: Tensor) -> None:
    """Page-locks memory for its lifetime, with the gaps between its rows."""
    runtime, place = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
    size = (len(memory) - 1) * memory.stride(0) + memory.shape[1]
    torch.cuda.check_error(runtime.cudaHostRegister(place, size, 0))
    weakref.finalize(memory, runtime.cudaHostUnregister, place)


def _bytes_of(kv: Tensor) -> Tensor:
    """The pool as [page, bytes]."""
    return kv.view(len(kv), -1).view(torch.uint8)

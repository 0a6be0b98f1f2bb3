"""Copies between a pool's pages and rows of host memory.

Rows are what the second tier stores pages in. One more row than it asks for is
the `staging` row, through which a page comes from a file. `save` and `restore`
return when the bytes are there; each of the two may be called on a thread of its
own, beside the engine's.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import numpy
import torch
from torch import Tensor

from baton.core.errors import InvalidConfig
from baton.engine.page_file import PageBytes

Move = tuple[int, int]
"""A page and a row."""


class PageMemory(Protocol):
    @property
    def staging(self) -> int:
        """The row for what comes from files."""

    def row(self, row: int) -> PageBytes:
        """The bytes of a row."""

    def save(self, moves: Sequence[Move]) -> None:
        """Copies pages into rows."""

    def restore(self, row: int, page: int) -> None:
        """Copies a row into a page."""


def page_memory(kv: Tensor, rows: int, room: PageBytes | None = None) -> PageMemory:
    """For the pool `kv` [page, ...], with so many rows and the staging row; in `room`
    [rows + 1, bytes], if it is given."""
    try:
        if room is None:
            room = numpy.empty((rows + 1, kv[0].nbytes), numpy.uint8)
        return CpuMemory(kv, room) if kv.device.type == "cpu" else CudaMemory(kv, room)
    except (MemoryError, RuntimeError) as error:
        raise InvalidConfig(
            f"there is no host memory for {rows} pages: {error}", field="cache.host_memory"
        ) from error


class CpuMemory:
    """A pool that is in host memory itself. Copies take one core, and let Python go on."""

    def __init__(self, kv: Tensor, room: PageBytes) -> None:
        self._pages: PageBytes = _bytes_of(kv).numpy()  # [page, bytes]
        self._rows = room
        self.staging = len(room) - 1

    def row(self, row: int) -> PageBytes:
        found: PageBytes = self._rows[row]
        return found

    def save(self, moves: Sequence[Move]) -> None:
        for page, row in moves:
            self._rows[row] = self._pages[page]

    def restore(self, row: int, page: int) -> None:
        self._pages[page] = self._rows[row]


class CudaMemory:
    """A GPU's pool. Page-locked rows, and a stream for each direction: steps go on meanwhile."""

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

    def save(self, moves: Sequence[Move]) -> None:
        with torch.cuda.stream(self._saving):
            for page, row in moves:
                self._rows[row].copy_(self._pages[page], non_blocking=True)
        self._saving.synchronize()

    def restore(self, row: int, page: int) -> None:
        with torch.cuda.stream(self._restoring):
            self._pages[page].copy_(self._rows[row], non_blocking=True)
        self._restoring.synchronize()


def _lock(memory: Tensor) -> None:
    """For as long as it is there: what lies at its place next is locked anew. Its rows may lie
    apart: what is between them is locked too."""
    runtime, place = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
    size = (len(memory) - 1) * memory.stride(0) + memory.shape[1]
    torch.cuda.check_error(runtime.cudaHostRegister(place, size, 0))
    weakref.finalize(memory, runtime.cudaHostUnregister, place)


def _bytes_of(kv: Tensor) -> Tensor:
    """The pool as [page, bytes]."""
    return kv.view(len(kv), -1).view(torch.uint8)

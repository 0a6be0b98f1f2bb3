"""Memory in huge pages, where the system has them: products read weights and rows from so many
places at once that addresses in small pages are translated again and again."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading

import torch
from torch import Tensor

_LINE = 64
"""Bytes of a cache line."""

_SHARED = 32 << 20
"""Bytes that small tensors share: alone they would not fill a huge page."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in memory that is taken when it is first written."""
    count = math.prod(shape)
    return torch.frombuffer(_mapped(count * dtype.itemsize), dtype=dtype, count=count).view(shape)


def copied(numbers: Tensor) -> Tensor:
    """The same numbers, next to those that were copied before."""
    target = _shared.take(numbers.nbytes).view(numbers.dtype).view(numbers.shape)
    return target.copy_(numbers)


def _mapped(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _Shared:
    """Memory that is given out from its start to its end, and freed with the last tensor in it."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def take(self, size: int) -> Tensor:
        """Bytes that begin a cache line."""
        whole = -(-size // _LINE) * _LINE
        with self._lock:
            if whole > len(self._left):
                self._left = zeros((max(whole, _SHARED),), torch.uint8)
            taken, self._left = self._left[:size], self._left[whole:]
        return taken


_shared = _Shared()

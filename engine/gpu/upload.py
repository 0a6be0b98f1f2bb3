"""Copies weights from host memory, such as a mapped file, to a device.

Several threads fill a pinned buffer with a piece of a tensor; the device copies it from there
while they fill the next. Copies are in the order of the calling thread's stream: what it computes
next sees them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

THREADS = min(8, len(os.sched_getaffinity(0)))
"""Eight saturate a PCIe link from the page cache."""

BUFFERS = 3
BUFFER_BYTES = 32 << 20
SHARED_BYTES = 1 << 20
"""Smaller pieces are copied by the calling thread."""

# Numpy copies without torch's own threads, but lacks bfloat16.
_BITS = {2: torch.int16, 4: torch.int32}


class Upload:
    """Copies tensors to one device; used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="upload")
        self._free: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        for _ in range(BUFFERS):
            buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=self._pinned)
            self._free.append((buffer, None))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """target = source, of 2- or 4-byte numbers, in the target's type. Returns when `source`
        has been read."""
        for piece, place in _pieces(source, target):
            buffer, copied = self._free.popleft()
            if copied is not None:
                copied.synchronize()
            staged = buffer[: piece.nbytes].view(piece.dtype).view(piece.shape)
            self._fill(staged, piece)
            if place.dtype != piece.dtype:
                staged = staged.to(self._device, non_blocking=True)
            place.copy_(staged, non_blocking=True)
            self._free.append((buffer, record_event() if self._pinned else None))

    def close(self) -> None:
        """Waits for the copies and frees the buffers."""
        for _, copied in self._free:
            if copied is not None:
                copied.synchronize()
        self._free.clear()
        self._threads.shutdown()

    def _fill(self, staged: Tensor, piece: Tensor) -> None:
        bits = _BITS[piece.itemsize]
        into, data = staged.view(bits).numpy(), piece.view(bits).numpy()
        if piece.nbytes < SHARED_BYTES:
            np.copyto(into, data)
            return
        rows = -(-len(data) // THREADS)
        parts = [slice(start, start + rows) for start in range(0, len(data), rows)]
        for done in [self._threads.submit(np.copyto, into[some], data[some]) for some in parts]:
            done.result()


def _pieces(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields parts of both that fit into a buffer."""
    if source.nbytes <= BUFFER_BYTES:
        yield source, target
        return
    rows = BUFFER_BYTES // source[0].nbytes
    if rows == 0:
        for each in zip(source, target, strict=True):
            yield from _pieces(*each)
        return
    for start in range(0, len(source), rows):
        some = slice(start, start + rows)
        yield source[some], target[some]


def record_event() -> torch.cuda.Event:
    """Records an event in the current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event

"""Steps recorded once and replayed: one launch instead of hundreds.

A recording has a fixed number of rows. Its inputs are in one buffer that is filled before
each replay; its outputs stay where the recording left them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baton.core.errors import Internal

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


def memory_pool(device: torch.device) -> _POOL_HANDLE | None:
    """Memory that all recordings share: only one runs at a time."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


class Recording:
    """A recorded body of kernels; where it is not recordable, it runs each time."""

    def __init__(self, body: Callable[[], Tensor], *, recordable: bool) -> None:
        self._body = body
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Tensor | None = None
        self._recordable = recordable

    def record(self, pool: _POOL_HANDLE | None) -> None:
        """Runs the body once to compile its kernels, then records it."""
        if not self._recordable:
            return
        self._body()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Only this thread's calls can break it: the transfer thread and NCCL's query their own
        # events meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._output = self._body()

    def replay(self) -> Tensor:
        if not self._recordable:
            return self._body()
        if self._graph is None or self._output is None:
            raise Internal("a step was replayed before it was recorded")
        self._graph.replay()
        return self._output


def row_counts(most: int) -> list[int]:
    """The recorded batch sizes: close together where a row costs the most."""
    counts = [1, 2, 4, *range(8, 33, 4), *range(40, 65, 8), *range(80, 129, 16)]
    counts += range(160, most + 32, 32)
    return [count for count in counts if count < most] + [most]


PROMPT_ROWS = (16, 32, 64, 128, 192, 256, 384, 512)
"""Recorded sizes of steps over prompts, whose kernels are short."""

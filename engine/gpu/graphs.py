"""Steps recorded once and replayed: one launch instead of hundreds.

A recording has a fixed number of rows. Its inputs are in one buffer that is filled before
each replay; its outputs stay where the recording left them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Recorder:
    """Records bodies one after another, into memory that all share: only one runs at a time.

    torch.cuda.graph would free all cached memory before each of them.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, body: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            # Only this thread's calls can break it: the transfer thread and NCCL's query their
            # own events meanwhile.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                output = body()
            finally:
                graph.capture_end()
        return graph, output


class Recording:
    """A body of kernels, replayed once it is recorded; until then, it runs each time."""

    def __init__(self, body: Callable[[], Tensor]) -> None:
        self._body = body
        self._recorded: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def record(self, recorder: Recorder) -> None:
        """Runs the body once to load its kernels, then records it."""
        self._body()
        self._recorded = recorder.record(self._body)

    def replay(self) -> Tensor:
        if self._recorded is None:
            return self._body()
        graph, output = self._recorded
        graph.replay()
        return output


def row_counts(most: int) -> list[int]:
    """The recorded batch sizes: close together where a row costs the most."""
    counts = [1, 2, 4, *range(8, 33, 4), *range(40, 65, 8), *range(80, 129, 16)]
    counts += range(160, most + 32, 32)
    return [count for count in counts if count < most] + [most]


PROMPT_ROWS = (16, 32, 64, 128, 192, 256, 384, 512)
"""Recorded sizes of steps over prompts, whose kernels are short."""

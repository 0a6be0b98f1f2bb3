"""Steps recorded once and replayed: one launch instead of hundreds.

A recording has a fixed number of rows. Its inputs are in one buffer that is filled before
each replay; its outputs stay where the recording left them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from baton.core.process import no_collections
from baton.engine.architecture import Architecture


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
        # A collection may free the recordings of an earlier runner, which breaks this one.
        with torch.cuda.stream(self._stream), no_collections():
            # With "thread_local", calls of other threads do not break it: the transfer thread and
            # NCCL's threads query their own events meanwhile.
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


class Recordings(NamedTuple):
    """Recordings of steps, by number of rows."""

    decode: dict[int, Recording]
    guess: dict[int, Recording]  # steps that decode, with several rows of a sequence
    prompt: dict[int, Recording]


def row_counts(most: int) -> list[int]:
    """The recorded batch sizes: close together where a row costs the most."""
    counts = [1, 2, 4, *range(8, 33, 4), *range(40, 65, 8), *range(80, 129, 16)]
    counts += range(160, most + 32, 32)
    return [count for count in counts if count < most] + [most]


PROMPT_ROWS = (16, 32, 64, 128, 192, 256, 384, 512)
"""Recorded sizes of steps over prompts, whose kernels are short."""

MORE_ROWS = (768, 1024, 1280, 1536, 2048)
"""Further sizes, if a layer has little to compute for its number of kernels."""

HOST_BOUND = 150e9
"""Multiplications of one layer that take a GPU 0.6 ms: in that time the host launches the layer's
kernels."""

FP8_HOST_BOUND = 600e9
"""The same in FP8: products are twice as fast, and the host launches one more kernel for each and
takes 1.4 ms for a layer."""


def prompt_rows(shape: Architecture, chunk_tokens: int, *, fp8: bool = False) -> list[int]:
    """Recorded sizes of steps over prompts, of up to `chunk_tokens` rows: those that take the host
    longer to launch than the device to run. `fp8`: weights are in FP8."""
    bound = FP8_HOST_BOUND if fp8 else HOST_BOUND
    products = _products_of_a_row(shape) / shape.layers
    needed = next((rows for rows in MORE_ROWS if rows >= chunk_tokens), MORE_ROWS[-1])
    more = [rows for rows in MORE_ROWS if rows <= needed and rows * products <= bound]
    return [*PROMPT_ROWS, *(more if chunk_tokens > PROMPT_ROWS[-1] else ())]


def _products_of_a_row(shape: Architecture) -> int:
    """Multiplications of a row in all layers, without attention."""
    heads = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    experts = shape.routing.per_row * shape.routing.columns if shape.routing else 0
    columns = sum(experts if sparse else shape.intermediate for sparse in shape.sparse)
    return shape.hidden * (shape.layers * heads + 3 * columns)

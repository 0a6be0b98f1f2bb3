"""The GPU runner, alone or as two ranks on one device: on a GPU, or interpreted."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import torch
from forks import fork
from interpreted_kernels import speed_up
from torch import Tensor

from baton.engine.architecture import Split, read_architecture
from baton.engine.checkpoint import Checkpoint
from baton.engine.empty_pages import stored_dtype
from baton.engine.engine import Engine
from baton.engine.gpu import graphs
from baton.engine.gpu import runner as gpu_runners
from baton.engine.gpu.adapter_slots import AdapterSlots
from baton.engine.gpu.device import AdapterRoom, GpuSettings
from baton.engine.gpu.runner import GpuRunner
from baton.engine.grammar import Grammars
from baton.engine.model_choice import KvDtype, read_model, stored_shape
from baton.engine.page_groups import make_pool
from baton.engine.tensor_parallel import Group
from baton.engine.weights import load_model
from baton.kernels.gpu import rotary

END_SECONDS = 10.0
FEW_PROGRAMS: tuple[tuple[ModuleType, str, object], ...] = (
    (rotary, "FEW_TOKENS", 0),
    (gpu_runners, "SPARE_BLOCKS", 4),
    (graphs, "PROMPT_ROWS", (8, *graphs.PROMPT_ROWS)),
)
"""The interpreter pays by program: all heads of a token are one, as in larger steps, and recorded
steps have less room to spare. test_gpu_rotary.py runs both forms."""


def gpu_runner(
    folder: Path,
    device: str,
    pages: int,
    page_size: int,
    group: Group | None = None,
    room: AdapterRoom | None = None,
    kv_dtype: KvDtype = "auto",
    short_chunk: int = 1,
    *,
    packed: bool = False,
) -> GpuRunner:
    """A runner over poisoned pages. With a group, which it connects: one rank of it. With `room`,
    adapters may be added to it. `packed`: with the codes of a quantized checkpoint."""
    whole = read_architecture(folder)
    source = Checkpoint(folder, quantization=whole.quantization)
    balanced = kv_dtype != "auto"
    model = load_model(
        source, whole, torch.float32, device, group, balanced=balanced, packed=packed
    )
    if group:
        group.connect(torch.device(device))
    shape = model.architecture
    kv = poisoned_pages(
        stored_shape(shape.pages_shape(pages, page_size), kv_dtype, "cuda"), kv_dtype, device
    )
    adapters = AdapterSlots(model, room, group) if room else None
    runner = GpuRunner(model, kv, 128, 4, group, adapters=adapters, short_chunk=short_chunk)
    runner.record()
    return runner


def poisoned_pages(size: tuple[int, ...], kv_dtype: KvDtype, device: str) -> Tensor:
    """Of NaNs: codes have them in their scales."""
    if kv_dtype == "auto":
        return torch.full(size, torch.nan, device=device)
    kv = torch.full(size, -1, dtype=torch.int8, device=device)  # scales of ones alone: NaN
    return kv.view(stored_dtype(kv_dtype, torch.float32))


def engine_of(runner: GpuRunner, folder: Path, pages: int, page_size: int) -> Engine:
    """An engine around a runner, for what needs no other part of it."""
    shape = read_model(folder, "native")
    pool = make_pool(pages, page_size, shape.slices.windows)
    grammars = Grammars(folder, shape.vocabulary_size)
    adapters = runner._adapters
    nothing = torch.empty(0)
    return Engine(
        shape,
        Split(),
        pool,
        nothing.dtype,
        nothing,
        128,
        "",
        grammars,
        lambda gpu: runner,
        GpuSettings(),
        adapters,
    )


@contextlib.contextmanager
def two_ranks(
    folder: Path,
    device: str,
    pages: int,
    page_size: int,
    workspace: Path,
    room: AdapterRoom | None = None,
) -> Iterator[GpuRunner]:
    """Rank 0 of two; rank 1 follows it in its own process."""
    here, there = multiprocessing.Pipe()
    arguments = (folder, device, pages, page_size, workspace / "meeting", there, room)
    process = fork(_follow, arguments)
    there.close()
    group = Group(Split(0, 2), workspace / "meeting", [here])
    try:
        yield gpu_runner(folder, device, pages, page_size, group, room)
    finally:
        group.close()
        process.join(END_SECONDS)
        process.kill()


def _follow(
    folder: Path,
    device: str,
    pages: int,
    page_size: int,
    meeting: Path,
    steps: Connection,
    room: AdapterRoom | None,
) -> None:
    torch.set_num_threads(1)
    if device == "cpu":
        speed_up()
        for module, name, value in FEW_PROGRAMS:
            setattr(module, name, value)
    runner = gpu_runner(folder, device, pages, page_size, Group(Split(1, 2), meeting), room)
    with contextlib.suppress(EOFError):
        while True:
            runner.follow(steps.recv_bytes())

"""Prepares a GPU for serving: all memory allocated, all steps recorded.

Everything a step may need is allocated here, so that no step runs out of memory later: pages
get what the weights and the largest step leave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from baton.core.types import AttemptKey, Sampling, Work
from baton.engine.architecture import Architecture
from baton.engine.gpu.adapter_slots import AdapterSlots
from baton.engine.gpu.device import GpuSettings, memory_left
from baton.engine.gpu.forward import layer_weights
from baton.engine.gpu.graphs import prompt_rows
from baton.engine.gpu.numerics import Numerics
from baton.engine.gpu.prompt_attention import (
    LIBRARY_TOKENS,
    RECORDED_CONTEXT,
    prepare,
    supports,
)
from baton.engine.gpu.runner import SAMPLED_ROWS, GpuRunner, slot_count
from baton.engine.gpu.sampler import ADJUSTED_ROWS
from baton.engine.model import Model
from baton.engine.page_pool import PagePool
from baton.engine.sequence import Sequence
from baton.engine.step import Plan
from baton.engine.tensor_parallel import Group
from baton.kernels.gpu.experts import rows_of_tilings
from baton.kernels.gpu.latent_attention import filling_heads
from baton.kernels.gpu.low_rank import MOST_PARTS
from baton.kernels.gpu.sampling import FEW_ROWS
from baton.kernels.gpu.shrink import SPLITS
from baton.kernels.gpu.splits import split_rows
from baton.kernels.packed import PackedWeight
from baton.kernels.routing import Routing

LIBRARY_BYTES = 2 << 30
"""The CUDA context, the libraries' own workspaces, compiled kernels, fragments."""

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(repetition_penalty=1.1),
    Sampling(repetition_penalty=1.1, temperature=1.0),
)
"""All kinds of sampling: the best token or a drawn one, of plain or adjusted logits."""

PAGE_ENTRY_BYTES = 4
"""Bytes of an entry in the page table."""

GROUP_BYTES = 1 << 30
"""NCCL's buffers, allocated when the ranks connect."""


StartProgress = Callable[[str, float], None]
"""Receives the current task and its completed fraction."""

PromptPart = tuple[int, int]
"""Start and number of the tokens of a prompt that one step computes."""


def memory_for_pages(
    settings: GpuSettings,
    model: Model,
    context: int,
    page_size: int,
    dtype: torch.dtype,
    device: str,
    group: Group | None = None,
) -> int:
    """Bytes left for pages once the weights of this rank's part of a model are loaded."""
    reserved = runner_bytes(settings, model.architecture, context, page_size, dtype)
    reserved += LIBRARY_BYTES
    reserved += GROUP_BYTES if group else 0
    reserved += _decoded_bytes(model)
    beside = f"the weights and a step of {settings.chunk_tokens} tokens"
    return memory_left(settings, device, reserved, beside)


def runner_bytes(
    settings: GpuSettings, shape: Architecture, context: int, page_size: int, dtype: torch.dtype
) -> int:
    """The bytes that steps and the page table need."""
    entries = slot_count(settings.max_batch) * -(-context // page_size)
    table = PAGE_ENTRY_BYTES * entries * len(shape.slices.windows)
    return _work_bytes(settings, shape, context, dtype) + table


def _decoded_bytes(model: Model) -> int:
    """The most bytes that products decode of packed weights, in recorded steps and in others."""
    packed = [each for each in layer_weights(model) if isinstance(each, PackedWeight)]
    return 2 * max((each.shape.numel() * each.dtype.itemsize for each in packed), default=0)


def _work_bytes(
    settings: GpuSettings, shape: Architecture, context: int, dtype: torch.dtype
) -> int:
    """The most bytes that the largest step and the recordings hold at once."""
    attended = shape.heads * shape.head_dim
    kv_token = 2 * shape.kv_heads * shape.head_dim
    row = 3 * shape.hidden + 4 * attended + 2 * kv_token + 3 * shape.intermediate
    if shape.routing:
        row += shape.routing.per_row * (shape.hidden + shape.routing.columns + 6)
        row += 2 * shape.routing.outputs
    if settings.adapters:  # What shrink leaves for three modules of a layer, in float32.
        row += 2 * MOST_PARTS * (SPLITS + 1) * settings.adapters.rank
    if latent := shape.latent:  # Of a long chunk in fast numerics.
        kv_token += shape.heads * (latent.plain + latent.value)
    rows = settings.chunk_tokens + 2 * LIBRARY_TOKENS
    rows += 2 * max(settings.max_batch, prompt_rows(shape, settings.chunk_tokens)[-1])
    logits = 4 * max(settings.max_batch, SAMPLED_ROWS) * shape.vocabulary_size
    values = row * rows + kv_token * context + logits
    tables = (
        4 * context * shape.head_dim * len(shape.ropes) + 64 * ADJUSTED_ROWS * shape.vocabulary_size
    )
    filling = filling_heads(shape.heads) if shape.latent else shape.kv_heads
    parts = split_rows(settings.max_batch, context, shape.heads, filling)
    return values * dtype.itemsize + tables + 4 * parts * (shape.head_dim + 2)


def start_runner(
    model: Model,
    kv: Tensor,
    pool: PagePool,
    context: int,
    settings: GpuSettings,
    progress: StartProgress,
    group: Group | None = None,
    adapters: AdapterSlots | None = None,
) -> GpuRunner:
    """A runner with all steps recorded and nothing left to compile.

    In a group all ranks call it at once; the others then follow rank 0's rehearsals.
    """
    numerics = Numerics(settings.numerics)
    limits = context, settings.max_batch
    runner = GpuRunner(
        model,
        kv,
        *limits,
        group,
        numerics,
        settings.chunk_tokens,
        adapters,
        guesses=settings.guesses,
        short_chunk=settings.short_chunk,
    )
    # After a role switch, pages may be in use or in quarantine.
    most = min(settings.chunk_tokens, context, _free_tokens(pool))
    shape = model.architecture
    with runner.compiling():
        if group is None:  # in a group, other ranks would follow with tokens that nothing computed
            _rehearse_steps(runner, pool, most, context, shape.routing)
    progress("kernels", 1.0)
    runner.record(lambda done: progress("steps", done / 2))
    dtype = model.embedding.dtype
    fast = numerics is Numerics.FAST and supports(shape, dtype, kv.device, numerics)
    if fast and not shape.latent:
        prepare(
            shape,
            dtype,
            kv.device,
            most,
            context,
            lambda done: progress("steps", 0.5 + done / 2),
        )
    if group is None or group.split.rank == 0:
        _rehearse_steps(runner, pool, most, context, shape.routing)
    progress("steps", 1.0)
    return runner


def _rehearse_steps(
    runner: GpuRunner, pool: PagePool, most: int, context: int, routing: Routing | None
) -> None:
    """Runs one step of each kind that is not fully recorded. `most` is the largest chunk."""
    _rehearse(runner, pool, [(0, most)])
    for sampling in SAMPLINGS:
        for rows in (1, min(FEW_ROWS + 1, pool.free // pool.slices)):
            _rehearse(runner, pool, [(0, 1)] * rows, sampling)
    # A step with a prompt beside a decoding sequence is never recorded.
    for rows in (most, *(rows_of_tilings(routing) if routing else ())):
        beside = min(rows - 1, most - pool.page_size)
        if beside > 1:
            _rehearse(runner, pool, [(0, 1), (0, beside)])
    # Long chunks with a cached prefix, aligned with the library's lengths or not.
    long = runner.recorded_rows + 1
    first, count = (0, long) if long <= most else (RECORDED_CONTEXT, LIBRARY_TOKENS + 1)
    for start in (pool.page_size, LIBRARY_TOKENS, LIBRARY_TOKENS + pool.page_size):
        part = (first + start, min(most, count))
        if sum(part) <= min(context, _free_tokens(pool)):
            _rehearse(runner, pool, [part])


def _free_tokens(pool: PagePool) -> int:
    """Tokens that the free pages of a pool hold, in all layers."""
    return pool.free // pool.slices * pool.page_size


def _rehearse(
    runner: GpuRunner, pool: PagePool, parts: list[PromptPart], sampling: Sampling = SAMPLINGS[0]
) -> None:
    """Runs one step that computes these parts, each the end of a prompt."""
    with contextlib.ExitStack() as leases:
        plan: Plan = {}
        for start, tokens in parts:
            work = Work(
                AttemptKey("rehearsal", 0), [0] * (start + tokens), sampling, 1, frozenset()
            )
            pages = pool.pages_for(start + tokens)
            lease = leases.enter_context(pool.acquire(pages))
            lease.cover(pages)
            plan[Sequence(work, lease, computed=start)] = tokens
        runner.launch(plan).wait()

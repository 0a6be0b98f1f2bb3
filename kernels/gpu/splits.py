"""The splits of a context that several programs share when decoding, and their merge.

The first program merges its own splits, the others store each of theirs, and a second kernel
merges these in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.fixed_order import SPLIT, fades

WANTED_PROGRAMS = 512
"""How many programs fill the chip."""

MOST_PROGRAMS = 32
"""Most programs that share a context."""

MERGED_TOGETHER = 16
"""Splits whose results are loaded before the first of them is merged."""


def programs_for(batch: int, kv_heads: int, wanted: int = WANTED_PROGRAMS) -> int:
    """How many programs share one sequence's context: enough to fill the chip, no more."""
    each = triton.cdiv(wanted, batch * kv_heads)
    return min(triton.next_power_of_2(each), MOST_PROGRAMS)


@dataclass(frozen=True, slots=True)
class SplitWorkspace:
    """The splits' results for the merging kernel. Successive calls may share it."""

    sums: Tensor  # [sequences * heads * splits, head_dim], float32
    weights: Tensor  # [sequences * heads * splits, 2], float32: highest score, normalizer
    splits: int  # of a sequence

    @classmethod
    def make(
        cls,
        batch: int,
        context: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> SplitWorkspace:
        rows = split_rows(batch, context, heads, kv_heads)
        return cls(
            torch.empty(rows, head_dim, dtype=torch.float32, device=device),
            torch.empty(rows, 2, dtype=torch.float32, device=device),
            triton.cdiv(context, SPLIT),
        )


def split_rows(batch: int, context: int, heads: int, kv_heads: int) -> int:
    """Rows of a workspace for batches of any size up to `batch`."""
    shared = (size for size in range(1, batch + 1) if programs_for(size, kv_heads) > 1)
    return max(shared, default=0) * heads * triton.cdiv(context, SPLIT)


def merge_splits(
    extents: Tensor,
    workspace: SplitWorkspace,
    programs: int,
    heads: int,
    window: int,
    out: Tensor,
) -> None:
    """Merges the results that `programs` programs per row left -> out [B, heads * dim].

    extents are positions [B], one per row, or blocks [n, 4] of rows in order (see
    kernels/gpu/guess_attention.py).
    """
    dim = workspace.sums.shape[1]
    block_d = max(16, triton.next_power_of_2(dim))
    blocks = 0 if extents.dim() == 1 else triton.next_power_of_2(len(extents))
    _merge[(len(out) if blocks else len(extents), heads)](
        extents,
        workspace.sums,
        workspace.weights,
        out,
        window,
        workspace.splits,
        programs,
        len(extents),
        HEADS=heads,
        DIM=dim,
        BLOCK_D=block_d,
        SPLIT=SPLIT,
        COUNT=MERGED_TOGETHER,
        BLOCKS=blocks,
        num_warps=4 if block_d <= 256 else 8,
        enable_fp_fusion=False,
    )


@triton.jit
def _unstack(x, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """x [COUNT, SIZE] -> a tuple of its rows."""
    parts = (tl.trans(x),)
    for level in tl.static_range(COUNT.bit_length() - 1):
        halves = ()
        for index in tl.static_range(1 << level):
            pair = tl.reshape(parts[index], (SIZE, 2, COUNT >> (level + 1)))
            halves = halves + tl.split(tl.permute(pair, (0, 2, 1)))
        parts = halves  # type: ignore[assignment]
    return parts


@triton.jit(
    do_not_specialize=["splits", "programs", "blocks"],
    do_not_specialize_on_alignment=["extents_pointer"],
)
def _merge(
    extents_pointer,
    sums_pointer,
    weights_pointer,
    out_pointer,
    window,
    splits,
    programs,
    blocks,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Merges one head of one row: the first program's result, then each further split."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    if BLOCKS == 0:
        position = tl.load(extents_pointer + sequence)
        earliest = position
    else:
        block = tl.arange(0, BLOCKS)
        entries = extents_pointer + block * 4
        counts = tl.load(entries + 2, mask=block < blocks, other=0)
        begins = tl.load(entries, mask=block < blocks, other=0)
        holds = (begins <= sequence) & (sequence < begins + counts)
        earliest = tl.sum(tl.where(holds, tl.load(entries + 1, mask=holds, other=0), 0))
        # All rows of a block have its splits; those that a row does not see have no weight.
        position = earliest + tl.sum(tl.where(holds, counts, 0)) - 1
    first = tl.maximum(earliest - window + 1, 0) if window > 0 else 0
    active = position // SPLIT - first // SPLIT + 1
    if position >= 0:
        dim = tl.arange(0, BLOCK_D)
        row = sequence.to(tl.int64) * HEADS + head
        highest = tl.full([BLOCK_D], float("-inf"), dtype=tl.float32)
        total, sums = tl.zeros_like(highest), tl.zeros_like(highest)
        for split in range(tl.cdiv(active, programs) - 1, active, COUNT):
            index = split + tl.arange(0, COUNT)[:, None] + tl.zeros([1, BLOCK_D], dtype=tl.int32)
            # Splits beyond the last repeat it with weight 0.
            at = row * splits + tl.minimum(index, active - 1)
            found = tl.load(
                sums_pointer + at * DIM + dim[None, :], mask=(dim < DIM)[None, :], other=0.0
            )
            highests = tl.load(weights_pointer + 2 * at)
            highests = tl.where(index < active, highests, float("-inf"))
            totals = tl.load(weights_pointer + 2 * at + 1)
            found = _unstack(found, COUNT, BLOCK_D)
            highests = _unstack(highests, COUNT, BLOCK_D)
            totals = _unstack(totals, COUNT, BLOCK_D)
            for each in tl.static_range(COUNT):
                highest, fade, share = fades(highest, tl.reshape(highests[each], (BLOCK_D,)))
                total = tl.fma(total, fade, tl.reshape(totals[each], (BLOCK_D,)) * share)
                sums = tl.fma(sums, fade, tl.reshape(found[each], (BLOCK_D,)) * share)
        to = out_pointer + row * DIM + dim
        tl.store(to, (sums * (1.0 / total)).to(out_pointer.dtype.element_ty), mask=dim < DIM)

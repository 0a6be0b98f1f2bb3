"""The splits of a context that several programs share when decoding, and their merge.

Programs store the results of their splits, and a second kernel merges these in order. The first
program may merge its own splits before.
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
    heads: int,
    window: int,
    out: Tensor,
    merging: int | None = None,
) -> None:
    """Merges the results that programs left -> out [B, heads * dim].

    `merging` is the number of programs per row if the first one has merged its own splits.
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
        merging or workspace.splits,
        len(extents),
        HEADS=heads,
        DIM=dim,
        BLOCK_D=block_d,
        SPLIT=SPLIT,
        COUNT=MERGED_TOGETHER,
        BLOCKS=blocks,
        num_warps=max(1, block_d // 128),
        enable_fp_fusion=False,
    )


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
    """Merges one head of one row: what the first of `programs` has merged, then each further
    split. If none merges, there are as many programs as splits."""
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
        highest, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
        sums = tl.zeros([BLOCK_D], dtype=tl.float32)
        for split in range(tl.cdiv(active, programs) - 1, active, COUNT):
            found = ()
            for each in tl.static_range(COUNT):
                at, inside = row * splits + split + each, split + each < active
                weight_at, sums_at = weights_pointer + 2 * at, sums_pointer + at * DIM + dim
                found += (  # type: ignore[assignment]
                    tl.load(weight_at, mask=inside, other=float("-inf")),
                    tl.load(weight_at + 1, mask=inside, other=0.0),
                    tl.load(sums_at, mask=inside & (dim < DIM), other=0.0),
                )
            for each in tl.static_range(COUNT):
                highest, fade, share = fades(highest, found[3 * each])
                total = tl.fma(total, fade, found[3 * each + 1] * share)
                sums = tl.fma(sums, fade, found[3 * each + 2] * share)
        to = out_pointer + row * DIM + dim
        tl.store(to, (sums * (1.0 / total)).to(out_pointer.dtype.element_ty), mask=dim < DIM)

"""Attention of decode steps on a GPU, over pages of bfloat16 numbers and of one-byte codes.

    python -m bench.code_attention

In the shape of a layer of Llama 3.1 8B, prints us a layer: over bfloat16 pages; over pages of codes
with the kernel for any GPU and with the one for this GPU, whose results must be equal; and the time
to read the pages of codes at COPY_RATE.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from baton.kernels import GPU_SCALE_BYTES
from baton.kernels.attention import Scoring
from baton.kernels.gpu.decode_attention import decode_anywhere, decode_attention
from baton.kernels.gpu.rotary import HeadShape, Projected
from baton.kernels.gpu.splits import SplitWorkspace
from bench.gpu_floors import graph_ms

HEADS, KV_HEADS, DIM, PAGE_SIZE = 32, 8, 128, 16
LAYERS = 4
"""Attended in turn: the pages of one alone might stay in the cache."""

ROWS = [(1, 512), (1, 8192), (8, 512), (32, 512), (32, 2048), (64, 1024), (128, 512), (256, 512)]
"""Sequences, and tokens of each."""

CODES = torch.float8_e4m3fn, torch.int8
COPY_RATE = 4.3e12
"""Bytes per second of an H200 that copies within its memory."""


def make_pages(count: int, code: torch.dtype | None) -> Tensor:
    """Pages [count, LAYERS, 2, token, head, bytes] of random numbers, or of codes and scales."""
    place = count, LAYERS, 2, PAGE_SIZE, KV_HEADS
    numbers = torch.randn(*place, DIM, device="cuda", dtype=torch.bfloat16)
    if code is None:
        return numbers
    pages = torch.empty(*place, DIM + GPU_SCALE_BYTES, device="cuda", dtype=torch.uint8)
    pages[..., :DIM] = numbers.mul(40).clamp(-127, 127).to(code).view(torch.uint8)
    scales = torch.rand(*place, 1, device="cuda") * 0.02 + 0.001
    pages[..., DIM : DIM + 4] = scales.view(torch.uint8)
    return pages.view(code)


def attention_us(sequences: int, context: int, code: torch.dtype | None) -> list[float]:
    """The times over pages of `code`: on this GPU, and on any for codes."""
    shape = HeadShape(HEADS, KV_HEADS, DIM, None, True, 1e-5, Scoring(DIM**-0.5))
    each = context // PAGE_SIZE + 1
    table = torch.randperm(sequences * each, device="cuda", dtype=torch.int32)
    table = table.view(sequences, each)
    pages = make_pages(table.numel(), code)
    width = (HEADS + 2 * KV_HEADS) * DIM
    projected = Projected(torch.randn(sequences, width, device="cuda", dtype=torch.bfloat16))
    positions = torch.full((sequences,), context, device="cuda", dtype=torch.int32)
    rows = torch.arange(sequences, device="cuda", dtype=torch.int32)
    turns = torch.randn(context + 1, DIM, device="cuda")
    place = turns, rows, positions, table
    workspace = SplitWorkspace.make(sequences, context + 1, HEADS, KV_HEADS, DIM, table.device)
    outs: list[Tensor] = []

    def every(attend: Callable[..., Tensor]) -> None:
        out = projected.qkv.new_empty(sequences, HEADS * DIM)
        for layer in range(LAYERS):
            attend(projected, *place, pages[:, layer], shape, workspace, out)
        outs.append(out)

    ways = [decode_attention] if code is None else [decode_anywhere, decode_attention]
    found = [graph_ms(partial(every, way)) * 1e3 / LAYERS for way in ways]
    if not all(torch.equal(out, outs[0]) for out in outs):
        raise SystemExit("the results differ")
    return found


def main() -> None:
    names = ["bfloat16", "FP8, any", "FP8", "int8, any", "int8", "bytes"]
    print(f"{'us':<13}" + "".join(f"{name:>11}" for name in names))
    for sequences, context in ROWS:
        times = attention_us(sequences, context, None)
        for code in CODES:
            times += attention_us(sequences, context, code)
        size = sequences * context * 2 * KV_HEADS * (DIM + GPU_SCALE_BYTES)
        cells = "".join(f"{each:>11.1f}" for each in (*times, size / COPY_RATE * 1e6))
        print(f"{sequences:>3} x {context:<7,}" + cells, flush=True)


if __name__ == "__main__":
    main()

"""Compiles attention for Hopper, without a GPU: `python attention_resources.py`.

Prints a JSON object of bytes of shared memory by kernel, type and head size. Stands in for the
driver, the optimizer and the assembler, so nothing can be launched: Triton must not interpret, and
its cache must be a folder of this process.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from no_device import Driver, hurry
from triton.backends.nvidia import compiler
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton.kernels.attention import Scoring
from baton.kernels.gpu import chunk_attention, decode_attention
from baton.kernels.gpu.rotary import HeadShape, Projected

CASES = [(torch.bfloat16, 256), (torch.float32, 256)]
"""The widest heads that are served."""

ROWS = 128


def attend(dtype: torch.dtype, dim: int) -> None:
    """Calls the kernels of a step over prompts and of one that decodes."""
    shape = HeadShape(8, 4, dim, 300, rotates=True, epsilon=1e-5, scoring=Scoring(0.1, 50.0))
    qkv, out = torch.zeros(ROWS, 16 * dim, dtype=dtype), torch.zeros(ROWS, 8 * dim, dtype=dtype)
    kv = torch.zeros(4, 2, 16, 4, dim, dtype=dtype)
    numbers = torch.zeros(ROWS, 4, dtype=torch.int32)
    chunk_attention.chunk_attention(qkv, numbers, numbers, kv, shape, out)
    workspace = decode_attention.SplitWorkspace.make(ROWS, 64, 8, 4, dim, qkv.device)
    decode_attention.decode_attention(
        Projected(qkv), torch.zeros(64, dim), numbers[0], numbers[0], numbers, kv, shape,
        workspace, out,
    )  # fmt: skip


def main() -> None:
    hurry()
    driver.set_active(Driver())
    # What follows the plan of shared memory, and takes most of the time.
    compiler.llvm.optimize_module = lambda *_, **named: None
    CUDABackend.make_ptx = lambda self, source, metadata, *_: metadata.update(name="") or ""
    CUDABackend.make_cubin = lambda *_: b""
    found: dict[str, int] = {}

    def compiled(kernel: Any, grid: object, *args: object, **options: object) -> None:
        ready = kernel.warmup(*args, grid=grid, **options)
        found[f"{kernel.__name__} {dtype} {dim}"] = ready.metadata.shared

    JITFunction.__getitem__ = lambda kernel, grid: partial(compiled, kernel, grid)
    for dtype, dim in CASES:
        attend(dtype, dim)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

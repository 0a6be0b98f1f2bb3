"""Kernels of long prompts on a GPU: products in FP8 and attention of a long chunk.

    python -m bench.prompt_kernels [--rows 2048 8192]

For the Llama 3.1 8B shape, prints
- the matrix library's products in FP8, in us, of a layer: with one scale, and with a scale for each
  row and output, each with the sums of 128 inputs added in float32, and with all sums in the tensor
  cores (fast);
- the relative error of a product's codes, and of its result against the exact product of codes;
- TFLOP/s of Baton's attention of a long chunk (Hopper only) and of cuDNN's. After earlier tokens
  cuDNN's attends to these alone.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor

from baton.kernels.attention import Scoring
from baton.kernels.fp8 import Fp8Weight, quantize_to_fp8
from baton.kernels.gpu.fp8_rows import fp8_rows
from baton.kernels.gpu.long_attention import long_attention
from baton.kernels.gpu.rotary import HeadShape
from bench.gpu_floors import graph_ms

COPIES = 4
"""Weights of each product, in turn: one alone would stay in the cache."""

SHAPES = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
}
"""Outputs and inputs."""
HEADS, KV_HEADS, DIM = 32, 8, 128

WAYS = [(scaled, fast) for scaled in (False, True) for fast in (False, True)]
NAMES = ["one scale", "one, fast sums", "scales", "scales, fast sums"]
CHUNKS = [(8192, 0), (8192, 8192), (8192, 24_576)]
"""Tokens, and tokens before them."""


def product(x: Tensor, weight: Fp8Weight, *, scaled: bool, fast: bool) -> Tensor:
    codes, scales = fp8_rows(x)
    one = torch.ones((), device=x.device)
    rows, outputs = (scales[:, None], weight.scales[None]) if scaled else (one, one)
    return torch._scaled_mm(
        codes, weight.codes.t(), rows, outputs, out_dtype=x.dtype, use_fast_accum=fast
    )


def product_us(rows: int, outputs: int, inputs: int) -> list[float]:
    """Times of a product in each way, without the time to make codes."""
    weights = [quantize_to_fp8(_random(outputs, inputs).float()) for _ in range(COPIES)]
    codes, scales = fp8_rows(_random(rows, inputs))
    one = torch.ones((), device="cuda")

    def run(scaled: bool, fast: bool) -> None:
        for weight in weights:
            both = (scales[:, None], weight.scales[None]) if scaled else (one, one)
            torch._scaled_mm(
                codes, weight.codes.t(), *both, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

    return [graph_ms(partial(run, *way)) * 1e3 / COPIES for way in WAYS]


def print_products(rows: int) -> None:
    print(f"{rows:,} rows, us".ljust(20) + "".join(f"{name:>20}" for name in NAMES))
    layer = [0.0] * len(WAYS)
    for name, (outputs, inputs) in SHAPES.items():
        times = product_us(rows, outputs, inputs)
        layer = [sum(pair) for pair in zip(layer, times, strict=True)]
        print(name.ljust(20) + "".join(f"{each:>20.1f}" for each in times), flush=True)
    print("layer".ljust(20) + "".join(f"{each:>20.1f}" for each in layer), flush=True)


def print_errors() -> None:
    names = ["codes", "sums of 128", "fast sums"]
    print("error of a product".ljust(20) + "".join(f"{name:>20}" for name in names))
    for name, (outputs, inputs) in SHAPES.items():
        x, unrounded = _random(256, inputs), _random(outputs, inputs)
        weight = quantize_to_fp8(unrounded.float())
        codes, scales = fp8_rows(x)
        exact = codes.double() @ weight.codes.double().t()
        exact *= scales[:, None].double() * weight.scales[None].double()
        errors = [_error(exact, x.double() @ unrounded.double().t())]
        errors += [
            _error(product(x, weight, scaled=True, fast=fast), exact) for fast in (False, True)
        ]
        print(name.ljust(20) + "".join(f"{each:>20.3%}" for each in errors), flush=True)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def print_attention(count: int, before: int) -> None:
    qkv = _random(count, (HEADS + 2 * KV_HEADS) * DIM)
    keys, values = (_random(before + count, KV_HEADS, DIM) for _ in range(2))
    out = _random(count, HEADS * DIM)
    shape = HeadShape(HEADS, KV_HEADS, DIM, None, True, 1e-5, Scoring(DIM**-0.5, None))
    took = graph_ms(partial(long_attention, qkv, keys, values, before, shape, out))
    products = 4 * HEADS * DIM * count
    ours = products * (before + (count + 1) / 2) / took / 1e9
    query = qkv[:, : HEADS * DIM].view(1, count, HEADS, DIM).transpose(1, 2).contiguous()
    seen, pairs = (before, before) if before else (count, (count + 1) / 2)
    key, value = (each[:seen].transpose(0, 1)[None].contiguous() for each in (keys, values))
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    rest = (None, True, 0.0, not before, False)
    took = graph_ms(partial(attend, query, key, value, *rest))
    theirs = products * pairs / took / 1e9
    title = f"{count:,} tokens after {before:,}"
    print(title.ljust(30) + f"{ours:>10.0f}{theirs:>10.0f}", flush=True)


def _random(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128, 256, 512, 2048, 8192])
    options = parser.parse_args()
    torch.manual_seed(0)
    for rows in options.rows:
        print_products(rows)
    print_errors()
    print("attention, TFLOP/s".ljust(30) + f"{'Baton':>10}{'cuDNN':>10}")
    for count, before in CHUNKS:
        print_attention(count, before)


if __name__ == "__main__":
    main()

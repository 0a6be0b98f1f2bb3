"""Kernels of LoRA adapters in a long prompt on a GPU.

    python -m bench.adapter_kernels [--rows 2048] [--rank 16]

For a layer of the Llama 3.1 8B shape whose rows have the same adapter, prints the us of shrinking
the inputs of each product and of expanding onto it; for gates and ups also of gating, and of doing
both in one kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from baton.engine.gpu.adapter_rows import arrange_rows
from baton.kernels.gpu.adapted_gate import expand_and_gate
from baton.kernels.gpu.gate import gate_and_multiply
from baton.kernels.gpu.low_rank import (
    MOST_PARTS,
    AdapterStack,
    ProductAdapters,
    Shrunk,
    SlotRows,
    expand_onto,
)
from baton.kernels.gpu.norm import Scaled, scale_rows
from baton.kernels.gpu.shrink import shrink
from bench.gpu_floors import graph_ms

SHAPES = {
    "qkv": (4096, (4096, 5120, 6144)),
    "output": (4096, (4096,)),
    "gate and up": (4096, (14336, 28672)),
    "down": (14336, (4096,)),
}
"""Inputs, and where the outputs of each part end."""

COPIES = 4
"""Tensors of each kind, in turn: one alone would stay in the cache."""


def print_product(name: str, rows: SlotRows, rank: int) -> None:
    inputs, ends = SHAPES[name]
    count, tiles = len(rows.slots), len(rows.tiles)
    stack = AdapterStack(_random(1, len(ends) * rank, inputs), _random(1, ends[-1], rank), ends)
    counters = torch.zeros(1 + MOST_PARTS * tiles, dtype=torch.int32, device="cuda")
    adapters = ProductAdapters(stack, rows, counters[1:], counters)
    sources = [scale_rows(_random(count, inputs), _random(inputs), 1e-5) for _ in range(COPIES)]
    products = [_random(count, ends[-1]) for _ in range(COPIES)]
    shrunk = shrink(sources[0].x, adapters)
    cells = [
        _us(lambda source, _: shrink(source.x, adapters), sources, products),
        _us(lambda _, product: expand_onto(product, shrunk), sources, products),
    ]
    if name == "gate and up":
        cells += gate_us(shrunk, sources, products)
    print(name.ljust(16) + "".join(f"{each:>12.1f}" for each in cells), flush=True)


def gate_us(shrunk: Shrunk, sources: list[Scaled], products: list[Tensor]) -> list[float]:
    def separate(source: Scaled, product: Tensor) -> Tensor:
        return gate_and_multiply(product, source, None, "silu")

    def together(source: Scaled, product: Tensor) -> Tensor:
        return expand_and_gate(product, shrunk, source, None, "silu")

    return [_us(run, sources, products) for run in (separate, together)]


def _us(
    run: Callable[[Scaled, Tensor], object], sources: list[Scaled], products: list[Tensor]
) -> float:
    def every() -> None:
        for source, product in zip(sources, products, strict=True):
            run(source, product)

    return graph_ms(every) * 1e3 / COPIES


def _random(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    arrays = arrange_rows(np.zeros(options.rows, np.int32))
    rows = SlotRows(*(torch.from_numpy(each).to("cuda") for each in arrays))
    names = ["shrink", "expand", "gate", "both"]
    print(f"{options.rows:,} rows, us".ljust(16) + "".join(f"{name:>12}" for name in names))
    for name in SHAPES:
        print_product(name, rows, options.rank)


if __name__ == "__main__":
    main()

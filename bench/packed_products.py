"""Products of packed weights on one GPU, against products of bfloat16 weights, in microseconds.

    python -m bench.packed_products [--bits 4] [--rows 1 8 32 ...] [--tilings]

Measures the layers of the Llama 3.1 8B shape under a CUDA graph, each with enough different weights
in turn that the L2 cache holds none of them. `library`: the matrix library, in bfloat16; `ours`:
codes, decoded in registers; `decoded`: codes, written as bfloat16 for the library. --tilings lists
the best tilings of `ours`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from baton.kernels.gpu import linear, packed_rows
from baton.kernels.gpu.compile import compiling
from baton.kernels.gpu.linear import few_rows, few_rows_alone
from baton.kernels.gpu.norm import Scaled
from baton.kernels.gpu.packed_tiles import decoded
from baton.kernels.gpu.tilings import STAGE_BYTES, LinearTiling, row_block, stages_for
from baton.kernels.packed import Bits, PackedWeight, quantize_to_packed
from bench.gpu_floors import graph_ms

SHAPES = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
}
LEAST_BYTES = 400 << 20
"""Least bytes of the weights that take turns: several times the L2 cache."""


class Case(NamedTuple):
    name: str
    packed: list[PackedWeight]
    plain: Tensor  # bfloat16, several weights

    @property
    def gated(self) -> bool:
        return self.name == "gate and up"

    def ours(self, x: Tensor) -> None:
        for weight in self.packed:
            if self.gated:
                few_rows(Scaled(x, None, 1e-5), weight, gates="silu")
            else:
                few_rows_alone(x, weight)

    def library(self, x: Tensor) -> None:
        for weight in self.plain:
            torch.mm(x, weight.t())

    def decoded(self, x: Tensor) -> None:
        for weight in self.packed:
            torch.mm(x, decoded(weight).t())


def make_case(name: str, bits: Bits) -> Case:
    outputs, inputs = SHAPES[name]
    weight = torch.randn(outputs, inputs, device="cuda").mul_(0.02).bfloat16()
    one = quantize_to_packed(weight, bits)
    assert one is not None
    count = max(2, LEAST_BYTES // one.words.nbytes)
    packed = [
        one._replace(words=one.words.clone(), scales=one.scales.clone()) for _ in range(count)
    ]
    plain = weight.expand(max(2, LEAST_BYTES // weight.nbytes), -1, -1).contiguous()
    return Case(name, packed, plain)


def microseconds(run: Callable[[], None], count: int) -> float:
    return 1e3 * graph_ms(run) / count


def print_case(case: Case, rows: list[int]) -> None:
    for count in rows:
        x = torch.randn(count, SHAPES[case.name][1], device="cuda").bfloat16()
        cells = [f"{case.name:<12} {count:>5} rows"]
        for way in ("library", "ours", "decoded"):
            few = getattr(case, way)
            if way != "ours" or count <= 1024:
                weights = case.plain if way == "library" else case.packed
                cells.append(f"{way} {microseconds(partial(few, x), len(weights)):8.1f}")
        print("  ".join(cells), flush=True)


FEW = [
    *(LinearTiling(64, 256, 4, stages, 32) for stages in (4, 6, 8)),
    *(LinearTiling(64, 128, 4, stages, 32) for stages in (4, 6, 8)),
    *(LinearTiling(128, 128, 8, stages, 32) for stages in (3, 4)),
]
SOME = [
    *(LinearTiling(64, 128, 4, stages, 64) for stages in (3, 4, 6)),
    *(LinearTiling(128, 128, 8, stages, 64) for stages in (3, 4)),
    LinearTiling(64, 256, 4, 3, 64),
    LinearTiling(64, 64, 4, 6, 64),
]
MANY = [
    *(LinearTiling(64, 128, 4, stages, 128) for stages in (2, 3)),
    *(LinearTiling(128, 128, 8, stages, 128) for stages in (2, 3, 4)),
    *(LinearTiling(64, 64, 4, stages, 128) for stages in (3, 4)),
    *(LinearTiling(128, 64, 8, stages, 128) for stages in (4, 6)),
    LinearTiling(64, 64, 4, 3, 256),
    *(LinearTiling(128, 64, 8, stages, 256) for stages in (3, 4, 5)),
    LinearTiling(64, 128, 4, 3, 64),
    LinearTiling(128, 128, 8, 3, 64),
]
"""Tilings to try for up to 32 rows (FEW), up to 64 (SOME) and more (MANY)."""
AT_ONCE = [
    *(LinearTiling(64, depth, 4, stages, rows)
      for depth, stages in ((256, 3), (256, 4), (256, 6), (128, 4), (128, 6), (128, 8))
      for rows in (8, 16, 32, 64, 128)),
    *(LinearTiling(128, depth, 8, stages, rows)
      for depth, stages in ((128, 3), (128, 4), (64, 4), (64, 5), (64, 6))
      for rows in (64, 128, 256)),
    *(LinearTiling(64, 64, 4, stages, rows) for stages in (4, 6) for rows in (128, 256)),
]  # fmt: skip
"""Tilings to try for products that decode while they multiply."""


class Choice(NamedTuple):
    tiling: LinearTiling
    at_once: bool

    def use(self) -> None:
        vars(linear)["packed_tiling_for"] = lambda *_: self.tiling
        vars(packed_rows)["hopper_tiling_for"] = lambda *_: self.tiling if self.at_once else None


def choices(rows: int, bits: Bits) -> Iterator[Choice]:
    """The tilings that fit into shared memory and registers."""
    for tiling in FEW if rows <= 32 else SOME if rows <= 64 else MANY:
        block = row_block(tiling, rows)
        fits = stages_for(tiling, block, False, bits, 16) == tiling.stages
        registers = tiling.outputs * block // (32 * tiling.warps)
        if fits and registers <= 160:
            yield Choice(tiling, False)
    for tiling in AT_ONCE:
        shared = max(8, rows // 4) <= tiling.rows <= max(8, triton.next_power_of_2(rows))
        if shared and stages_for(tiling, tiling.rows, False, bits, 16) == tiling.stages:
            yield Choice(tiling, True)


def print_tilings(case: Case, rows: list[int], bits: Bits) -> None:
    xs = {n: torch.randn(n, SHAPES[case.name][1], device="cuda").bfloat16() for n in rows}
    every = [(n, choice) for n in rows for choice in choices(n, bits)]
    with compiling():
        for count, choice in every:
            choice.use()
            case._replace(packed=case.packed[:1]).ours(xs[count])
    for count in rows:
        found = []
        for at, choice in every:
            if at == count:
                choice.use()
                try:
                    run = partial(case.ours, xs[count])
                    found.append((microseconds(run, len(case.packed)), choice))
                except OutOfResources as error:
                    print("skipped", choice, type(error).__name__, flush=True)
        for took, choice in sorted(found, key=lambda each: each[0])[:5]:
            print(f"{case.name:<12} {count:>5} rows  {took:8.1f}  {choice}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--bits", type=int, choices=[4, 8], default=4)
    default = [1, 8, 32, 64, 128, 256, 512, 1024, 2048]
    parser.add_argument("--rows", type=int, nargs="+", default=default)
    parser.add_argument("--tilings", action="store_true")
    options = parser.parse_args()
    print(f"{options.bits} bits, {STAGE_BYTES >> 10} KiB of stages", flush=True)
    for name in SHAPES:
        case = make_case(name, options.bits)
        if options.tilings:
            print_tilings(case, options.rows, options.bits)
        else:
            print_case(case, options.rows)
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

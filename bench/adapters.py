"""LoRA adapters on one GPU: the time that they add to steps, and the time to load one.

    python -m bench.adapters [--config CONFIG_JSON] [--rank 16]
    python -m bench.adapters --zipf        where requests for many adapters go (no GPU):
                                           bench/adapter_spread.py

Needs a GPU, torch, triton and safetensors. The model has the config's shape (Llama 3.1 8B's by
default) and random bfloat16 weights; the adapters have random weights in all linear layers. Times
are measured as in bench.gpu; `base` is the same runner in steps without an adapter. A load reads a
folder whose files are in the page cache, checks its digest and copies it to the GPU; a later load
copies it from host memory.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from baton.core.adapter_store import find_adapter
from baton.core.types import Adapter
from baton.engine.architecture import parse_architecture
from baton.engine.gpu.adapter_slots import AdapterSlots
from baton.engine.gpu.device import AdapterRoom
from baton.engine.gpu.numerics import Numerics
from baton.engine.random_tensors import RandomTensors
from baton.engine.weights import load_model
from bench import adapter_spread
from bench.adapter_spread import write_adapter
from bench.gpu import CONFIGS, Bench, prompts_of
from bench.gpu_floors import PAGE_SIZE
from bench.timing import median_seconds

SLOTS, TOKENS, MAX_BATCH, TRIES = 16, 60_000, 64, 5
STEPS = ((1, 1, 512), (32, 1, 512), (32, 8, 512), (32, 16, 512), (64, 8, 512))
"""Rows of a decode step, the number of different adapters, and the context."""
PROMPTS = (512, 2048)


def loads(slots: AdapterSlots, adapter: Adapter) -> Iterator[tuple[str, float]]:
    """Times loads from a folder and from host memory. Leaves the adapter in host memory only."""

    def load() -> None:
        slots.add_adapter(adapter, slots.load_adapter(adapter))
        torch.cuda.synchronize()
        slots.drop_adapter(adapter.digest)

    began = time.perf_counter()
    load()
    yield "first load of a folder", time.perf_counter() - began
    slots._host.clear()
    began = time.perf_counter()
    load()
    yield "load of a folder", time.perf_counter() - began
    yield "load from host memory", median_seconds(load, TRIES)


def fill(slots: AdapterSlots, weights: torch.Tensor) -> list[Adapter]:
    """As many adapters as there are slots."""
    adapters = [Adapter(bytes([number]), "") for number in range(slots.count)]
    for adapter in adapters:
        slots.add_adapter(adapter, weights)
    return adapters


def step_seconds(bench: Bench, rows: int, context: int, adapters: list[Adapter] | None) -> float:
    prompts = prompts_of(bench, rows, context)
    bench.generate(prompts, 2, adapters)
    short = min(bench.generate(prompts, 2, adapters) for _ in range(3))
    long = min(bench.generate(prompts, 130, adapters) for _ in range(3))
    return (long - short) / 128


def prompt_seconds(bench: Bench, length: int, adapters: list[Adapter] | None) -> float:
    prompts = prompts_of(bench, 1, length)
    bench.generate(prompts, 1, adapters)
    return statistics.median(bench.generate(prompts, 1, adapters) for _ in range(9))


def print_steps(bench: Bench, adapters: list[Adapter]) -> None:
    print(f"{'':<36}{'base':>10}{'adapters':>10}{'ratio':>8}")
    for rows, different, context in STEPS:
        chosen = [adapters[row % different] for row in range(rows)]
        base, mixed = (step_seconds(bench, rows, context, each) for each in (None, chosen))
        print_row(f"step {rows} x {context}, {different} adapters", base, mixed)
    for length in PROMPTS:
        base, mixed = (prompt_seconds(bench, length, each) for each in (None, adapters[:1]))
        print_row(f"prompt of {length:,}", base, mixed)


def print_row(title: str, base: float, mixed: float) -> None:
    cells = f"{base * 1e3:>10.2f}{mixed * 1e3:>10.2f}{mixed / base:>8.3f}"
    print(f"{title:<36}{cells}  ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--config", type=Path, default=CONFIGS / "llama-3.1-8b.json")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--zipf", action="store_true", help="many adapters in few slots")
    options = parser.parse_args()
    if options.zipf:
        adapter_spread.main()
        return
    shape = parse_architecture(options.config)
    model = load_model(RandomTensors("cuda"), shape, torch.bfloat16, "cuda")
    pages = TOKENS // PAGE_SIZE * len(shape.slices.windows)
    kv = torch.zeros(shape.pages_shape(pages, PAGE_SIZE), dtype=torch.bfloat16, device="cuda")
    slots = AdapterSlots(model, AdapterRoom(SLOTS, options.rank, 2**31))
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(model, Path(folder), options.rank)
        adapter = find_adapter(folder)
        for what, seconds in loads(slots, adapter):
            print(f"{what:<36}{seconds * 1e3:>10.1f}  ms")
        weights = slots.load_adapter(adapter)
    print(f"{'an adapter':<36}{weights.nbytes / 1e6:>10.1f}  MB")
    bench = Bench(model, kv, Numerics.INVARIANT, slots, MAX_BATCH)
    print_steps(bench, fill(slots, weights))


if __name__ == "__main__":
    main()

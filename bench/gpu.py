"""One engine on one GPU: time to first token, decode steps and throughput, against the hardware.

    python -m bench.gpu [--config CONFIG_JSON ... | --all] [--rows ttft decode batch busy]
                        [--numerics ...] [--quantization fp8 | int8 | int4]

Needs a GPU, torch and triton; no weights, no network, no ray. The model has the
shape of the config (Llama 3.1 8B's by default, all of bench/configs with --all) and
random bfloat16 weights; prompts are random tokens, answers greedy. Nothing is
skipped: every token is sampled, fetched and appended.

A time to first token ends when the caller has the token. A decode step is (time of
130 tokens - time of 2 tokens) / 128 of the whole batch. A row's floor is the time of
its matrix products alone, under a CUDA graph (for experts, those that evenly spread
rows choose), plus its attention by cuDNN (prompts) or the time to read its keys and
values once (decode), all measured in the same run. The floor of a product with packed
weights is the time to read them for few rows, and that of the product in bfloat16 for
many. Both numerics are measured one after the other for each row.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from baton.core.types import Adapter, AttemptKey, Sampling, Work
from baton.engine.architecture import parse_architecture
from baton.engine.empty_pages import stored_dtype
from baton.engine.gpu.adapter_slots import AdapterSlots
from baton.engine.gpu.numerics import Numerics
from baton.engine.gpu.runner import GpuRunner
from baton.engine.model import Model
from baton.engine.model_choice import stored_shape
from baton.engine.page_groups import make_pool
from baton.engine.random_tensors import RandomTensors
from baton.engine.sequence import Sequence
from baton.engine.step import InFlightStep, Plan
from baton.engine.weights import load_model
from bench.gpu_floors import CHUNK, MAX_BATCH, PAGE_SIZE, Floors
from bench.vllm_figures import VLLM

CONFIGS = Path(__file__).parent / "configs"
CONTEXT = 36_000
KV_TOKENS = 180_000


class Bench:
    """An engine without a worker, and the simplest loop that keeps it busy."""

    def __init__(
        self,
        model: Model,
        kv: Tensor,
        numerics: Numerics,
        adapters: AdapterSlots | None = None,
        max_batch: int = MAX_BATCH,
    ) -> None:
        self.model = model
        self.pool = make_pool(len(kv), PAGE_SIZE, model.architecture.slices.windows)
        self.runner = GpuRunner(model, kv, CONTEXT, max_batch, None, numerics, adapters=adapters)
        began = time.perf_counter()
        with self.runner.compiling():
            pass
        compiled = time.perf_counter()
        self.runner.record()
        times = f"{compiled - began:.1f} s, recorded in {time.perf_counter() - compiled:.1f} s"
        print(f"{numerics}: kernels compiled in {times}", flush=True)

    def generate(
        self, prompts: list[list[int]], count: int, adapters: list[Adapter] | None = None
    ) -> float:
        """Answers all prompts with `count` tokens each, by their adapters. Returns the seconds."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        sequences = [
            self._submit(prompt, count, adapter)
            for prompt, adapter in zip_longest(prompts, adapters or [])
        ]
        flights: deque[tuple[Plan, InFlightStep]] = deque()
        while plan := self._next(sequences, count):
            flights.append((plan, self.runner.launch(plan)))
            if len(flights) > 1:
                self._settle(*flights.popleft())
        while flights:
            self._settle(*flights.popleft())
        took = time.perf_counter() - began
        assert all(sequence.generated == count for sequence in sequences)
        for sequence in sequences:
            sequence.lease.release()
        return took

    def _submit(self, prompt: list[int], count: int, adapter: Adapter | None) -> Sequence:
        key = AttemptKey("bench", 0)
        work = Work(key, prompt, Sampling(), count, frozenset(), adapter=adapter)
        pages = self.pool.pages_for(len(prompt) + count)
        lease = self.pool.acquire(pages)
        lease.cover(pages)
        return Sequence(work, lease)

    def _next(self, sequences: list[Sequence], count: int) -> Plan:
        """Plans as much of the prompts as a step takes; then one token per answer."""
        plan: Plan = {}
        budget = CHUNK
        for sequence in sequences:
            if sequence.computed < sequence.prompt_length and budget:
                plan[sequence] = min(budget, sequence.prompt_length - sequence.computed)
                budget -= plan[sequence]
        return plan or {each: 1 for each in sequences if each.generated + each.expected < count}

    def _settle(self, plan: Plan, flight: InFlightStep) -> None:
        for sequence, token in zip(plan, flight.wait(), strict=True):
            if isinstance(token, int):
                sequence.append(token)


@dataclass(frozen=True)
class Measured:
    title: str
    value: float
    floor: float | None
    unit: str = "ms"


def prompts_of(bench: Bench, count: int, length: int) -> list[list[int]]:
    source, size = random.Random(length), bench.model.architecture.vocabulary_size
    return [source.choices(range(size), k=length) for _ in range(count)]


def first_tokens(bench: Bench, floors: Floors) -> Iterator[Measured]:
    for length in (128, 512, 2048, 8192, 32768):
        prompts = prompts_of(bench, 1, length)
        bench.generate(prompts, 1)
        times = [bench.generate(prompts, 1) for _ in range(9 if length < 8192 else 4)]
        value = statistics.median(times) * 1e3
        yield Measured(f"TTFT {length:,}", value, floors.prompt(length))


def decode_steps(bench: Bench, floors: Floors) -> Iterator[Measured]:
    shapes = [(1, 512), (1, 8192), (8, 512), (32, 512), (32, 2048), (64, 1024), (128, 512)]
    for batch, context in [*shapes, (256, 512)]:
        prompts = prompts_of(bench, batch, context)
        bench.generate(prompts, 2)
        repeats = 3 if batch * context < 30_000 else 1
        short = min(bench.generate(prompts, 2) for _ in range(repeats))
        long = min(bench.generate(prompts, 130) for _ in range(repeats))
        step = (long - short) / 128 * 1e3
        yield Measured(f"step {batch} x {context:,}", step, floors.step(batch, context))


def throughput(bench: Bench, _: Floors) -> Iterator[Measured]:
    prompts = prompts_of(bench, 128, 1024)
    bench.generate(prompts, 2)
    value = 128 * 128 / bench.generate(prompts, 128)
    yield Measured("128 at once, 1,024 in, 128 out", value, None, "tok/s")


def busy_share(bench: Bench, _: Floors) -> Iterator[Measured]:
    """The share of a decode run in which the GPU computes."""
    for batch in (1, 32, 256):
        prompts = prompts_of(bench, batch, 512)
        bench.generate(prompts, 4)
        yield Measured(f"GPU busy, {batch} decoding", _busy(bench, prompts), 100.0, "%")


def _busy(bench: Bench, prompts: list[list[int]]) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        bench.generate(prompts, 60)
    kernels = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or []
        if event.device_type.name == "CUDA"
    )
    # The second half has decode steps only.
    kernels = kernels[len(kernels) // 2 :]
    covered, end = 0.0, kernels[0][0]
    for start, stop in kernels:
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return float(100.0 * covered / (end - kernels[0][0]))


ROWS: dict[str, Callable[[Bench, Floors], Iterator[Measured]]] = {
    "ttft": first_tokens,
    "decode": decode_steps,
    "batch": throughput,
    "busy": busy_share,
}


def print_rows(rows: tuple[Measured, ...], others: dict[str, float]) -> None:
    """One row, measured in each of the numerics."""
    first = rows[0]
    theirs = others.get(first.title)
    cells = [f"{first.title:<32}", *(f"{row.value:>11.2f}" for row in rows)]
    cells.append(f"{first.value / rows[-1].value:>8.3f}" if len(rows) > 1 else "")
    cells.append(
        f"{first.floor:>10.2f}{first.value / first.floor:>8.3f}" if first.floor else " " * 18
    )
    if theirs:
        ratio = theirs / first.value if first.unit == "ms" else first.value / theirs
        cells.append(f"{theirs:>10.2f}{ratio:>10.2f}")
    print("".join(cells) + f"  {first.unit}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--config", type=Path, nargs="+", default=[CONFIGS / "llama-3.1-8b.json"])
    parser.add_argument("--all", action="store_true", help="every shape of bench/configs")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument(
        "--numerics", nargs="+", choices=list(Numerics), type=Numerics, default=list(Numerics)
    )
    parser.add_argument("--quantization", choices=["none", "fp8", "int8", "int4"], default="none")
    parser.add_argument("--kv-dtype", choices=["auto", "int8", "int4", "fp8"], default="auto")
    options = parser.parse_args()
    for config in sorted(CONFIGS.glob("*.json")) if options.all else options.config:
        print_shape(config, options)
        gc.collect()  # runners and their recordings form reference cycles
        torch.cuda.empty_cache()


def print_shape(config: Path, options: argparse.Namespace) -> None:
    numerics, quantization, kv_dtype = options.numerics, options.quantization, options.kv_dtype
    name = config.stem if quantization == "none" else f"{config.stem} in {quantization}"
    shape, others = parse_architecture(config), VLLM.get(name, {})
    model = load_model(
        RandomTensors("cuda"),
        shape,
        torch.bfloat16,
        "cuda",
        quantization=quantization,
        balanced=kv_dtype != "auto",
    )
    pages = KV_TOKENS // PAGE_SIZE * len(shape.slices.windows)
    size = stored_shape(shape.pages_shape(pages, PAGE_SIZE), kv_dtype, "cuda")
    kv = torch.zeros(size, dtype=stored_dtype(kv_dtype, torch.bfloat16), device="cuda")
    name += "" if kv_dtype == "auto" else f", {kv_dtype} pages"
    benches = [Bench(model, kv, each) for each in numerics]
    floors = Floors(model, kv)
    heads = [f"{name:<32}", *(f"{each:>11}" for each in numerics)]
    heads.append(f"{'ratio':>8}" if len(benches) > 1 else "")
    print("".join(heads) + f"{'floor':>10}{'ratio':>8}{'vLLM':>10}{'x as fast':>10}")
    for name in options.rows:
        for measured in zip(*(ROWS[name](bench, floors) for bench in benches), strict=True):
            print_rows(measured, others)


if __name__ == "__main__":
    main()

"""One engine in one process against transformers: time to first token, and tokens a second.

    python -m bench.engine [--model FOLDER] [--rows ttft-128 decode ...] [--skip-transformers]
    python -m bench.engine --quantization int8 [--dtype bfloat16] [--repeats 3] [--cpu-time]
    python -m bench.engine --kv-dtype int8
    python -m bench.engine --peers vllm=PYTHON llama.cpp=FOLDER

`--quantization` and `--kv-dtype` compare with unquantized weights and pages; `--peers` measures
other engines too (bench/peers). All are measured row by row, in turn.

Prompts are random tokens; answers are greedy and never end early. `decode` is
one stream after a prompt of 128 tokens. The batch rows count the tokens of all
answers over the whole time, prefill included.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from baton.core import model_store
from baton.core.types import AttemptKey, Sampling, Work
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.engine.step import Plan
from bench.peers import Peer

Prompts = list[list[int]]


class Generator(Protocol):
    """Answers prompts of equal length concurrently, with `count` greedy tokens each."""

    pid: int

    def generate(self, prompts: Prompts, count: int) -> None: ...


class Ours:
    """The engine under the simplest scheduler: prompts first, then all answers together."""

    def __init__(self, folder: Path, threads: int, chunk: int, **options: Any) -> None:
        self.engine = Engine.load(folder, threads=threads, kv_memory=1 << 30, **options)
        self._chunk = chunk
        self.pid = os.getpid()

    def generate(self, prompts: Prompts, count: int) -> None:
        sequences = [self.sequence(prompt, count) for prompt in prompts]
        while self.step(sequences, count):
            pass
        for sequence in sequences:
            sequence.lease.release()

    def step(self, sequences: list[Sequence], count: int) -> Plan:
        """Runs one step towards `count` tokens each. Returns its plan."""
        plan = self._next(sequences, count)
        for sequence, token in zip(plan, self.engine.step(plan) if plan else (), strict=True):
            if isinstance(token, int):
                sequence.append(token)
        return plan

    def sequence(self, prompt: list[int], count: int) -> Sequence:
        work = Work(AttemptKey("bench", 0), prompt, Sampling(), count, frozenset())
        pool = self.engine.pool
        pages = pool.pages_for(len(prompt) + count)
        lease = pool.acquire(pages)
        lease.cover(pages)
        return Sequence(work, lease)

    def _next(self, sequences: list[Sequence], count: int) -> Plan:
        """Plans as much of the prompts as the budget allows; then one token per answer."""
        plan: Plan = {}
        budget = self._chunk
        for sequence in sequences:
            if sequence.generated == 0 and budget:
                plan[sequence] = min(budget, sequence.uncomputed)
                budget -= plan[sequence]
        return plan or {each: 1 for each in sequences if each.generated < count}


class Transformers:
    """The same model under `generate` with its own cache, float32."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.pid = os.getpid()

    def generate(self, prompts: Prompts, count: int) -> None:
        import torch

        tokens = torch.tensor(prompts)
        self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    title: str
    unit: str
    measure: Callable[[Generator], float]

    @property
    def lower_is_better(self) -> bool:
        return self.unit == "ms"


def wall_time(_: int) -> float:
    return time.perf_counter()


def cpu_time(pid: int) -> float:
    """The CPU time of a process, on Linux of any: clock ids are made as in the kernel."""
    return time.clock_gettime(~pid << 3 | 2)


clock: Callable[[int], float] = wall_time


def seconds(generator: Generator, prompts: Prompts, count: int, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = clock(generator.pid)
        generator.generate(prompts, count)
        times.append(clock(generator.pid) - start)
    return statistics.median(times)


def random_prompts(count: int, length: int) -> Prompts:
    source = random.Random(length)
    return [[source.randrange(5, 30_000) for _ in range(length)] for _ in range(count)]


def first_token(length: int, repeats: int) -> Row:
    def measure(generator: Generator) -> float:
        return seconds(generator, random_prompts(1, length), 1, repeats) * 1e3

    return Row(f"TTFT {length:,} tokens", "ms", measure)


def one_stream(prompt: int, answer: int) -> Row:
    def measure(generator: Generator) -> float:
        prompts = random_prompts(1, prompt)
        prefill = seconds(generator, prompts, 1, 3)
        return answer / (seconds(generator, prompts, answer + 1, 3) - prefill)

    return Row("decode, one stream", "tok/s", measure)


def at_once(count: int, prompt: int, answer: int) -> Row:
    def measure(generator: Generator) -> float:
        return count * answer / seconds(generator, random_prompts(count, prompt), answer, 1)

    return Row(f"{count} at once, {prompt} in, {answer} out", "tok/s", measure)


ROWS = {
    "ttft-128": first_token(128, 5),
    "ttft-512": first_token(512, 3),
    "ttft-2048": first_token(2048, 1),
    "decode": one_stream(128, 64),
    "batch-8": at_once(8, 256, 64),
    "batch-16": at_once(16, 256, 64),
}


def run(generators: dict[str, Generator], names: list[str], repeats: int) -> list[list[float]]:
    """The best figure of each generator, by row; they are measured in turn."""
    for generator in generators.values():
        generator.generate(random_prompts(2, 64), 4)
    found = []
    for name in names:
        row = ROWS[name]
        turns = [[row.measure(each) for each in generators.values()] for _ in range(repeats)]
        best = min if row.lower_is_better else max
        found.append([best(figures) for figures in zip(*turns, strict=True)])
    return found


def print_table(titles: list[str], names: list[str], found: list[list[float]]) -> None:
    print(f"{'':<28}{''.join(f'{title:>16}' for title in titles)}{'times as fast':>16}")
    for name, figures in zip(names, found, strict=True):
        row = ROWS[name]
        cells = "".join(f"{figure:>10.1f} {row.unit:<5}" for figure in figures)
        ratio = figures[-1] / figures[0]
        print(f"{row.title:<28}{cells}{1 / ratio if row.lower_is_better else ratio:>16.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=model_store.EMBEDDED, help="a Hugging Face folder")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens per step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--quantization", choices=["none", "int8", "int4"], default="none")
    parser.add_argument("--kv-dtype", choices=["auto", "int8", "int4"], default="auto")
    parser.add_argument("--repeats", type=int, default=1, help="runs, of which the best is shown")
    parser.add_argument(
        "--cpu-time", action="store_true", help="measure CPU time, if the cores are shared"
    )
    parser.add_argument("--peers", nargs="+", default=[], metavar="NAME=WHERE")
    options = parser.parse_args()
    if options.cpu_time:
        global clock
        clock = cpu_time
    folder = model_store.locate(options.model)
    load = partial(Ours, folder, options.threads, options.chunk, dtype=options.dtype)
    generators: dict[str, Generator] = {}
    quantized = options.quantization != "none" or options.kv_dtype != "auto"
    if quantized:
        generators[options.dtype] = load()
    elif not options.skip_transformers:
        generators["transformers"] = Transformers(folder, options.threads)
    peers = {
        named.partition("=")[0]: Peer(named, folder, options.dtype, options.threads)
        for named in options.peers
    }
    generators |= peers
    title = options.quantization if options.quantization != "none" else "baton"
    generators[title] = load(quantization=options.quantization, kv_dtype=options.kv_dtype)
    found = run(generators, options.rows, options.repeats)
    print_table(list(generators), options.rows, found)
    for peer in peers.values():
        peer.close()


if __name__ == "__main__":
    main()

"""Compiled CPU kernels against torch's operators: times, and which bits depend on the batch.

    python -m bench.cpu_numerics [--threads 2] [--config CONFIG_JSON] [--parts bits products ...]

Needs torch and llvmlite; no weights, no network. The model has the shape of the config
(SmolLM2-135M's by default) and random weights. Both ways are measured in turn, each as the best
of some runs. `bits` counts the batch sizes, from 1 to 256 rows, at which some row differs from the
same row computed alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.architecture import Architecture, parse_architecture
from baton.engine.random_tensors import RandomTensors
from baton.engine.runner import Runner
from baton.engine.step import ChunkInputs
from baton.engine.weights import load_model
from baton.kernels.attention import (
    ChunkReads,
    DecodeReads,
    Scoring,
    chunk_attention,
    decode_attention,
)
from baton.kernels.cache import layer_caches
from baton.kernels.cpu import compiler
from baton.kernels.linear import GatedLinear, Linear, RMSNorm

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
}
PAGE_SIZE = 16
DTYPES = [torch.float32, torch.bfloat16]
ROWS = (1, 8, 32, 128, 512)
Action = Callable[[], object]


@contextlib.contextmanager
def torchs_path() -> Iterator[None]:
    """Disables compiled kernels within the context."""
    available = compiler.available
    compiler.available = lambda: False  # type: ignore[assignment]
    try:
        yield
    finally:
        compiler.available = available


def best(actions: dict[str, Action], seconds: float = 0.4) -> dict[str, float]:
    """The shortest time of each action, in ms; they are measured in turn."""
    times = dict.fromkeys(actions, float("inf"))
    for action in actions.values():
        action()
    end = time.perf_counter() + seconds * len(actions)
    while time.perf_counter() < end:
        for name, action in actions.items():
            began = time.perf_counter()
            action()
            times[name] = min(times[name], time.perf_counter() - began)
    return {name: 1e3 * found for name, found in times.items()}


def line(title: str, times: dict[str, float]) -> None:
    cells = "".join(f"{name:>12}{found:>10.3f}" for name, found in times.items())
    found = list(times.values())
    ratio = f"{found[1] / found[0]:>12.2f}x" if len(found) == 2 else ""
    print(f"{title:<44}{cells}{ratio}", flush=True)


def sizes_that_differ(product: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """How many batch sizes, from 1 to len(x) rows, change some row from what it is alone."""
    alone = torch.cat([product(x[row : row + 1]) for row in range(len(x))])
    return sum(not torch.equal(product(x[:rows]), alone[:rows]) for rows in range(1, len(x) + 1))


def padded(product: Callable[[Tensor], Tensor], block: int) -> Callable[[Tensor], Tensor]:
    """A product that multiplies padded blocks of rows one by one."""

    def of_blocks(x: Tensor) -> Tensor:
        filled = functional.pad(x, (0, 0, 0, -len(x) % block))
        parts = torch.split(filled, block)
        return torch.cat([product(part) for part in parts])[: len(x)]

    return of_blocks


def product_shapes(shape: Architecture) -> dict[str, tuple[int, int]]:
    """{name: (outputs, inputs)}"""
    query, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "qkv": (query + 2 * keys, shape.hidden),
        "output": (shape.hidden, query),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
        "head": (shape.vocabulary_size, shape.hidden),
    }


def linear_pair(
    kind: str, outputs: int, inputs: int, dtype: torch.dtype
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """torch's and the compiled product with the same weight and norm."""
    weight = torch.randn(outputs, inputs).div_(inputs**0.5).to(dtype)
    norm = RMSNorm(torch.rand(inputs).add_(0.5).to(dtype), 1e-5)
    if kind == "gate_up":
        theirs_gated, ours_gated = GatedLinear(weight), GatedLinear(weight)
        ours_gated.pack()
        return lambda x: theirs_gated(x, norm), lambda x: ours_gated(x, norm)
    theirs, ours = Linear(weight), Linear(weight)
    ours.pack()
    return lambda x: theirs(x, norm), lambda x: ours(x, norm)


def bits(shape: Architecture) -> None:
    print("\nrow counts of 256 with which some row is not what it is alone")
    for dtype in DTYPES:
        for kind, (outputs, inputs) in product_shapes(shape).items():
            theirs, ours = linear_pair(kind, min(outputs, 4096), inputs, dtype)
            x = torch.randn(256, inputs).to(dtype)
            blocks = {
                f"torch by {block}": sizes_that_differ(padded(theirs, block), x)
                for block in (16, 32, 64)
                if dtype != torch.float32 and kind != "head"
            }
            found = {
                "torch": sizes_that_differ(theirs, x),
                "compiled": sizes_that_differ(ours, x),
                **blocks,
            }
            error = (ours(x).double() - theirs(x).double()).norm() / theirs(x).double().norm()
            cells = "".join(f"{name:>16} {count:>4}" for name, count in found.items())
            print(f"{f'{kind} {dtype}':<32}{cells}   error {float(error):.1e}", flush=True)


def products(shape: Architecture) -> None:
    print("\nproducts with their norm, ms")
    for dtype in DTYPES:
        for kind, (outputs, inputs) in product_shapes(shape).items():
            theirs, ours = linear_pair(kind, outputs, inputs, dtype)
            for rows in ROWS:
                x = torch.randn(rows, inputs).to(dtype)
                times = best({"torch": lambda: theirs(x), "compiled": lambda: ours(x)}, 0.15)  # noqa: B023
                line(f"{kind} {dtype} {rows} rows", times)


class Pages:
    """Keys and values of one sequence, in pages in random order."""

    def __init__(self, shape: Architecture, tokens: int, dtype: torch.dtype) -> None:
        pages = tokens // PAGE_SIZE + 1
        size = (pages, 1, 2, PAGE_SIZE, shape.kv_heads, shape.head_dim)
        (self.cache,) = layer_caches(torch.randn(size).to(dtype))
        self.table = torch.randperm(pages)
        self._scoring = Scoring(shape.score_scale, shape.score_cap)

    def chunk(self, query: Tensor, position: int) -> Tensor:
        end = position + len(query)
        pages = self.table[: (end - 1) // PAGE_SIZE + 1]
        reads = ChunkReads(pages, 0, position, end, None)
        return chunk_attention(query, self.cache, reads, self._scoring)

    def decode(self, query: Tensor, ends: list[int]) -> Tensor:
        start = torch.zeros(len(ends), dtype=torch.int64)
        tables = self.table.repeat(len(ends), 1)
        reads = DecodeReads(tables, start, start, torch.tensor(ends), max(ends), False)
        return decode_attention(query, self.cache, reads, self._scoring)


def attention(shape: Architecture) -> None:
    print("\nattention of one layer, ms; numbers that differ between decode and any chunks")
    for dtype in DTYPES:
        for past, count in ((0, 64), (0, 512), (0, 2048), (1536, 512), (4096, 64)):
            pages = Pages(shape, past + count, dtype)
            query = torch.randn(count, shape.heads, shape.head_dim).to(dtype)

            def theirs() -> None:
                with torchs_path():
                    pages.chunk(query, past)  # noqa: B023

            times = best({"torch": theirs, "compiled": lambda: pages.chunk(query, past)}, 0.3)  # noqa: B023
            whole, third = pages.chunk(query, past), count // 3
            cut = torch.cat(
                (pages.chunk(query[:third], past), pages.chunk(query[third:], past + third))
            )
            ends = list(range(past + 1, past + count + 1, 7))
            single = pages.decode(query[::7].contiguous(), ends)
            differ = int((cut != whole).sum() + (single != whole[::7]).sum())
            line(f"{dtype} {count} after {past}: {differ} differ", times)
        for batch, tokens in ((1, 256), (1, 4096), (16, 512), (64, 512)):
            pages = Pages(shape, tokens, dtype)
            query = torch.randn(batch, shape.heads, shape.head_dim).to(dtype)
            ends = [tokens] * batch

            def gathered() -> None:
                with torchs_path():
                    pages.decode(query, ends)  # noqa: B023

            times = best({"torch": gathered, "compiled": lambda: pages.decode(query, ends)}, 0.2)  # noqa: B023
            line(f"{dtype} decode {batch} x {tokens}", times)


class Whole:
    """A model with random weights, and steps over sequences of random tokens."""

    def __init__(self, shape: Architecture, dtype: torch.dtype, tokens: int) -> None:
        self._model = load_model(RandomTensors("cpu"), shape, dtype, "cpu")
        self._pages = tokens // PAGE_SIZE
        size = shape.pages_shape(self._pages, PAGE_SIZE)
        self._runner = Runner(self._model, torch.zeros(size, dtype=dtype))

    @torch.inference_mode()
    def step(self, inputs: list[ChunkInputs]) -> Tensor:
        """Logits of the last token of each chunk."""
        return self._model.logits(self._runner._forward(inputs))

    def chunk(self, sequence: int, start: int, count: int, context: int) -> ChunkInputs:
        """Tokens of a sequence that has its own pages for `context` tokens."""
        tokens = [(11 * sequence + 7 * at + at * at) % 32_000 for at in range(start, start + count)]
        each = -(-context // PAGE_SIZE)
        pages = [(sequence * each + page) % self._pages for page in range(each)]
        return ChunkInputs(start, tokens, [pages], [start + count - 1])


def model(shape: Architecture) -> None:
    print("\nwhole model, ms")
    for dtype in DTYPES:
        ours = Whole(shape, dtype, 40_000)
        with torchs_path():
            theirs = Whole(shape, dtype, 40_000)

        def both(inputs: list[ChunkInputs], seconds: float) -> dict[str, float]:
            def fallback() -> None:
                with torchs_path():
                    theirs.step(inputs)  # noqa: B023

            return best({"torch": fallback, "compiled": lambda: ours.step(inputs)}, seconds)  # noqa: B023

        for count in (128, 512, 2048):
            line(f"{dtype} TTFT {count}", both([ours.chunk(0, 0, count, count)], 1.0))
        for batch in (1, 8, 32, 128):
            inputs = [ours.chunk(each, 256, 1, 257) for each in range(batch)]
            line(f"{dtype} decode {batch} x 256", both(inputs, 0.6))
        print(f"{dtype}: {logits_that_differ(ours)} logits differ, alone or not, in any chunks")


def logits_that_differ(ours: Whole) -> int:
    """Compares the logits of a sequence of 301 tokens: computed whole, and in chunks with its last
    token decoded beside other sequences."""
    context = 512
    whole = ours.step([ours.chunk(3, 0, 301, context)])
    differ = 0
    for size in (37, 64, 150):
        for start in range(0, 300, size):
            count = min(size, 300 - start)
            others = [ours.chunk(9, 0, 1 + size // 3, context)]
            ours.step([*others, ours.chunk(3, start, count, context)])
        for batch in (1, 5, 16, 60):
            others = [ours.chunk(10 + each, 0, 1, context) for each in range(batch)]
            found = ours.step([*others, ours.chunk(3, 300, 1, context)])
            differ += int((found[-1:] != whole).sum())
    return differ


PARTS = {"bits": bits, "products": products, "attention": attention, "model": model}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--config", type=Path, help="a model's config.json")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    DTYPES[:] = [getattr(torch, name) for name in options.dtypes]
    print(f"{platform.machine()}, torch {torch.__version__}, {options.threads} threads")
    print(f"compiled: {compiler.available() and compiler.registers()}, AMX {compiler.has_amx()}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(options.config.read_text() if options.config else json.dumps(SMOLLM2))
        shape = parse_architecture(path)
    with torch.inference_mode():
        for name in options.parts:
            PARTS[name](shape)


if __name__ == "__main__":
    main()

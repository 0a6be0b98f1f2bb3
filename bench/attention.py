"""Attention of a prompt's chunk on one CPU thread: keys laid out for many rows against keys read in
place, measured in turn.

    python -m bench.attention [--tokens 512] [--contexts 512 1024 2048] [--pages float32 int8 ...]

Times are CPU times of the thread, the best of --repeats, in the shape of the embedded model. A
context includes the chunk. A matrix product of the same run shows what the CPU can do. Without
AVX-512 keys are never laid out, and both columns measure the same code.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from baton.kernels.attention import ChunkReads, Scoring
from baton.kernels.cache import LayerCache, layer_caches
from baton.kernels.cpu import attention_shape, compiler, paged_attention
from baton.kernels.half_bytes import half_byte_codes
from baton.kernels.integers import head_codes
from baton.kernels.linear import Linear

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 16
HIDDEN, MLP = 576, 1536
PAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": Tensor.float,
    "bfloat16": Tensor.bfloat16,
    "int8": head_codes,
    "int4": half_byte_codes,
}


def attention(cache: LayerCache, *, in_place: bool) -> paged_attention.CompiledAttention:
    """Compiles attention that never lays out keys if `in_place`."""
    longest = 0 if in_place else attention_shape.LONGEST_COLUMN
    digest = f"in place {in_place} {compiler.source_digest()}"
    paged_attention._compiled.cache_clear()
    with (
        patch.object(attention_shape, "LONGEST_COLUMN", longest),
        patch.object(compiler, "source_digest", lambda: digest),
    ):
        scoring = Scoring(HEAD_DIM**-0.5)
        found = paged_attention.paged_attention(HEADS, cache, scoring, torch.float32)
    assert found is not None
    return found


def best_seconds(ways: list[Callable[[], Tensor]], repeats: int) -> list[float]:
    """The best time of each way; they are measured in turn."""
    found = [float("inf")] * len(ways)
    for _ in range(repeats):
        for index, way in enumerate(ways):
            start = time.thread_time()
            way()
            found[index] = min(found[index], time.thread_time() - start)
    return found


def chunk_reads(tokens: int, context: int) -> ChunkReads:
    """The reads of the last tokens of a context whose pages are in random order."""
    pages = torch.randperm(-(-context // PAGE_SIZE))
    return ChunkReads(pages, 0, context - tokens, context, None)


def operations(tokens: int, context: int) -> int:
    """Floating-point operations of the chunk's products."""
    pairs = tokens * (context - tokens) + tokens * (tokens + 1) // 2
    return 4 * HEADS * HEAD_DIM * pairs


def print_row(name: str, tokens: int, context: int, repeats: int) -> None:
    reads, query = chunk_reads(tokens, context), torch.randn(tokens, HEADS, HEAD_DIM)
    numbers = torch.randn(len(reads.pages), 1, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    (cache,) = layer_caches(PAGES[name](numbers))
    product, x = Linear(torch.randn(MLP, HIDDEN)), torch.randn(tokens, HIDDEN)
    product.pack()
    in_place, laid_out = (attention(cache, in_place=each) for each in (True, False))
    ways = [
        lambda: in_place.of_chunk(query, cache.kv, reads, None),
        lambda: laid_out.of_chunk(query, cache.kv, reads, None),
        lambda: product(x),
    ]
    if not torch.equal(ways[0](), ways[1]()):
        raise SystemExit("the results differ")
    before, after, of_product = best_seconds(ways, repeats)
    speeds = [operations(tokens, context) / each / 1e9 for each in (before, after)]
    speeds.append(2 * tokens * HIDDEN * MLP / of_product / 1e9)
    cells = "".join(f"{speed:>12.0f}" for speed in speeds)
    print(f"{name:<10}{context:>8,}{cells}{before / after:>15.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the chunk")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--pages", nargs="+", choices=list(PAGES), default=list(PAGES))
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("GFLOP/s")
    titles = "".join(f"{title:>12}" for title in ("in place", "laid out", "a product"))
    print(f"{'pages':<10}{'context':>8}{titles}{'times as fast':>15}")
    for name in options.pages:
        for context in options.contexts:
            print_row(name, options.tokens, context, options.repeats)


if __name__ == "__main__":
    main()

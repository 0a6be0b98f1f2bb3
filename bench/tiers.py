"""Restoring a prompt's pages, against computing them again.

    python -m bench.tiers [--model FOLDER] [--device cuda] [--random-weights] [--tokens N …]

One engine, without a cluster. A prompt is computed, saved to host memory and files,
evicted, and restored from each. Restored pages must be bitwise equal to the computed
ones. Files may be in the page cache.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.core import model_store
from baton.core.config import CacheConfig, Size
from baton.core.types import AttemptKey, Sampling, Work
from baton.engine.engine import Engine
from baton.engine.model_choice import choose_dtype
from baton.engine.second_tier import SecondTier, second_tier_of
from baton.engine.sequence import Sequence
from baton.engine.tier_copies import Tier
from baton.worker.backend import open_second_tier

CHUNK = 512
REPEATS = 3
WAIT_SECONDS = 60.0


@dataclass
class Bench:
    engine: Engine
    woken: threading.Event

    @property
    def tier(self) -> SecondTier:
        tier = second_tier_of(self.engine.pool)
        assert tier is not None
        return tier

    def compute(self, tokens: list[int]) -> list[bytes]:
        """Computes the prompt; returns the keys of its full pages."""
        pool = self.engine.pool
        work = Work(AttemptKey("prompt", 1), tokens, Sampling(), 1, frozenset())
        with pool.acquire(pool.pages_for(len(tokens))) as lease:
            sequence = Sequence(work, lease, chain=pool.chain(""))
            while sequence.uncomputed and not sequence.expected:
                self.engine.step({sequence: min(CHUNK, sequence.uncomputed)})
            sequence.settle(len(tokens))
        return sequence.chain.keys(tokens, len(tokens))

    def rest(self) -> None:
        """Waits for all copies."""
        assert self.tier.files is not None
        self.engine.pool.second_tier.advance()
        while self.engine.pool.returning or self.tier.files.pending:
            assert self.woken.wait(WAIT_SECONDS)
            self.woken.clear()
            self.engine.pool.second_tier.advance()

    def evict(self) -> None:
        with self.engine.pool.acquire(self.engine.pool.free) as lease:
            self.engine.kv[lease.pages] = 0

    def restore_pages(self, keys: list[bytes]) -> None:
        assert self.engine.pool.second_tier.restore_pages(keys) == len(keys)
        self.rest()

    def contents(self, keys: list[bytes]) -> torch.Tensor:
        return self.engine.kv[self.engine.pool.cache.find(keys)].clone()


def timed(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def measure(bench: Bench, count: int, seed: int) -> dict[str, float]:
    """Seconds by the source of the pages."""
    draw = random.Random(f"{count} {seed}")  # the same tokens in other chunks differ in last bits
    words = bench.engine.architecture.vocabulary_size
    tokens = [draw.randrange(words) for _ in range(count)]
    seconds = {"compute": timed(lambda: bench.compute(tokens))}
    keys = bench.engine.pool.chain("").keys(tokens, count)
    made = bench.contents(keys)
    bench.rest()
    for tier in ("host memory", "files"):
        if tier == "files":
            for key in keys:
                with bench.tier.tiers[Tier.HOST].hold([key]) as row:
                    row.forget()
        bench.evict()
        seconds[tier] = timed(lambda: bench.restore_pages(keys))
        assert torch.equal(bench.contents(keys), made), f"{tier}: other bits came back"
    bench.evict()
    return seconds


def report(count: int, size: int, runs: list[dict[str, float]]) -> None:
    for tier in runs[0]:
        best = min(run[tier] for run in runs)
        rate = "" if tier == "compute" else f"{size / best / 1e9:9.2f} GB/s"
        print(
            f"{count:7} tokens  {tier:12} {best * 1e3:10.2f} ms {count / best:12.0f} tok/s {rate}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=model_store.EMBEDDED, help="a Hugging Face folder")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    engine = Engine.load(
        model_store.locate(options.model),
        dtype=choose_dtype("auto", options.device),
        device=options.device,
        kv_memory=(1 if options.device == "cpu" else 8) << 30,
        threads=options.threads,
        random_weights=options.random_weights,
    )
    engine.pool.root = bytes(16)
    page_bytes = engine.kv[0].numel() * engine.kv.element_size()
    woken = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        host = Size(page_bytes * 3 * max(options.tokens) // engine.pool.page_size)
        open_second_tier(engine, CacheConfig(host, folder), "bench", woken.set)
        bench = Bench(engine, woken)
        bench.rest()
        for count in options.tokens:
            runs = [measure(bench, count, seed) for seed in range(REPEATS)]
            report(count, count // engine.pool.page_size * page_bytes, runs)
        bench.tier.close(WAIT_SECONDS)


if __name__ == "__main__":
    main()

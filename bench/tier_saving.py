"""How much saving pages to the second tier delays running answers.

    python -m bench.tier_saving [--model FOLDER] [--streams 4] [--pages 1 4 16]

One engine, without a cluster, decodes some answers. In each step a number of pages of other
prompts enters the full pool and evicts older ones. In every second round, pages are saved before
they are evicted: to host memory, and in a second table also to files. Rounds with and without
saving take turns, so that other load affects both. Pages enter as if they had arrived from
elsewhere, since computing them would hide the effect.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field

from baton.core import model_store
from baton.core.config import CacheConfig, Size
from baton.core.types import AttemptKey, Sampling, Work
from baton.engine.engine import Engine
from baton.engine.second_tier import SecondTier, second_tier_of
from baton.engine.sequence import Sequence
from baton.engine.step import Plan
from baton.engine.tier_copies import Tier
from baton.worker.backend import open_second_tier

PROMPT = 64
ROUND_STEPS = 8
HOST_SHARE = 2
"""Size of host memory, as a multiple of the pool."""
WAIT_SECONDS = 60.0


class Streams:
    """Answers that decode together, and pages that are saved beside them."""

    def __init__(self, engine: Engine, count: int, steps: int) -> None:
        self._engine = engine
        self._keys = itertools.count()
        self._sequences = [self._begin(index, steps) for index in range(count)]

    @property
    def saved(self) -> int:
        return self._tier.counts[Tier.HOST].stored

    @property
    def _tier(self) -> SecondTier:
        tier = second_tier_of(self._engine.pool)
        assert tier is not None
        return tier

    def fill(self) -> None:
        """Fills every free page."""
        self._bring(self._engine.pool.free)

    def step(self, pages: int, *, saving: bool) -> float:
        """Runs one step; returns its seconds."""
        began = time.perf_counter()
        if saving:
            self._engine.pool.second_tier.advance()
        self._bring(pages)
        self._run(dict.fromkeys(self._sequences, 1))
        return time.perf_counter() - began

    def rest(self) -> None:
        """Waits for all copies."""
        files = self._tier.files
        deadline = time.monotonic() + WAIT_SECONDS
        while self._tier.leases or (files is not None and files.pending):
            assert time.monotonic() < deadline, "pages are still being copied"
            self._engine.pool.second_tier.advance()
            time.sleep(0.001)

    def close(self) -> None:
        for sequence in self._sequences:
            sequence.lease.release()
        self._tier.close(WAIT_SECONDS)

    def _begin(self, index: int, steps: int) -> Sequence:
        draw = random.Random(index)
        words = self._engine.architecture.vocabulary_size
        prompt = [draw.randrange(words) for _ in range(PROMPT)]
        work = Work(AttemptKey(f"stream-{index}", 1), prompt, Sampling(), steps, frozenset())
        pool = self._engine.pool
        sequence = Sequence(work, pool.acquire(pool.pages_for(PROMPT + steps)))
        self._run({sequence: PROMPT})
        return sequence

    def _run(self, plan: Plan) -> None:
        for sequence, token in zip(plan, self._engine.step(plan), strict=True):
            assert isinstance(token, int)
            sequence.append(token)

    def _bring(self, pages: int) -> None:
        with self._engine.pool.acquire(pages) as lease:
            lease.name([next(self._keys).to_bytes(16, "big") for _ in range(pages)])


@dataclass
class Found:
    """Seconds of steps without and with saving, and how many pages were saved."""

    without: list[float] = field(default_factory=list)
    saving: list[float] = field(default_factory=list)
    saved: int = 0


def measure(streams: Streams, pages: int, rounds: int) -> Found:
    found = Found()
    for _ in range(rounds):
        found.without += [streams.step(pages, saving=False) for _ in range(ROUND_STEPS)]
        before = streams.saved
        found.saving += [streams.step(pages, saving=True) for _ in range(ROUND_STEPS)]
        found.saved += streams.saved - before
        streams.rest()
    return found


def print_row(pages: int, found: Found) -> None:
    both = found.without, found.saving
    cells = [
        f"{pages}",
        *(f"{statistics.mean(each) * 1e3:.1f} ms" for each in both),
        f"{statistics.mean(found.saving) / statistics.mean(found.without):.3f}",
        *(f"{max(each) * 1e3:.1f} ms" for each in both),
        f"{found.saved / len(found.saving):.1f}",
    ]
    print("".join(f"{cell:>14}" for cell in cells), flush=True)


def run(options: argparse.Namespace, files: str) -> None:
    engine = Engine.load(
        model_store.locate(options.model), kv_memory=options.kv_memory, threads=options.threads
    )
    engine.pool.root = bytes(16)
    woken = threading.Event()
    host = Size(HOST_SHARE * engine.kv.numel() * engine.kv.element_size())
    open_second_tier(engine, CacheConfig(host, files), "bench", woken.set)
    steps = 2 * ROUND_STEPS * options.rounds * len(options.pages) + ROUND_STEPS
    streams = Streams(engine, options.streams, steps)
    streams.fill()
    for _ in range(ROUND_STEPS - 1):
        streams.step(0, saving=False)
    print(f"saving to {'host memory and files' if files else 'host memory'}")
    titles = ("pages a step", "ITL without", "with", "ratio", "longest", "with", "saved")
    print("".join(f"{title:>14}" for title in titles))
    for pages in options.pages:
        print_row(pages, measure(streams, pages, options.rounds))
    streams.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=model_store.EMBEDDED, help="a Hugging Face folder")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 4, 16], help="new pages a step")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of 8 steps each way")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-memory", type=Size.parse, default=Size.parse("256MiB"))
    options = parser.parse_args()
    run(options, "")
    with tempfile.TemporaryDirectory() as folder:
        run(options, folder)


if __name__ == "__main__":
    main()

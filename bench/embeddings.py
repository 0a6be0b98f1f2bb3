"""Embeddings a second: `python -m bench.embeddings --model FOLDER`.

The encoder in FOLDER as the embedding model of a cluster (a prefill worker, a decode worker that
idles, a router), over gRPC, and in turns by sentence-transformers in this process, where that is
installed: the same texts of 3 to 60 words, the same number of threads. Both with tokenizing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from baton import Client
from baton.engine import quality
from bench.processes import FREE_ROUTER, router, workers

Embed = Callable[[Sequence[str]], numpy.ndarray]

INPUTS = 128
"""Of a call."""


def draw_texts(count: int) -> list[str]:
    words = Path(quality.__file__).with_suffix(".txt").read_text().split()
    draw = random.Random(1)
    return [" ".join(draw.choices(words, k=draw.randint(3, 60))) for _ in range(count)]


def cpu_seconds(process: int) -> float:
    """User and system time so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


class Way:
    """A way to embed, in processes of its own."""

    def __init__(self, embed: Embed, processes: Sequence[int]) -> None:
        self.embed = embed
        self._processes = processes
        self._speeds: list[tuple[float, float]] = []

    def measure(self, texts: Sequence[str]) -> None:
        began, cpu = time.perf_counter(), self._cpu_seconds
        self.embed(texts)
        taken = time.perf_counter() - began, self._cpu_seconds - cpu
        self._speeds.append((len(texts) / taken[0], len(texts) / taken[1]))

    @property
    def best(self) -> tuple[float, float]:
        """Texts a second, by the clock and by CPU time. Other work on the cores only slows down."""
        clock, cpu = zip(*self._speeds, strict=True)
        return max(clock), max(cpu)

    @property
    def _cpu_seconds(self) -> float:
        return sum(map(cpu_seconds, self._processes))


def by_cluster(client: Client, name: str) -> Embed:
    def embed(texts: Sequence[str]) -> numpy.ndarray:
        calls = [texts[start : start + INPUTS] for start in range(0, len(texts), INPUTS)]
        return numpy.concatenate([client.embed(each, model=name) for each in calls])

    return embed


def by_sentence_transformers(folder: Path) -> Embed | None:
    if importlib.util.find_spec("sentence_transformers") is None:
        print("sentence-transformers is not installed")
        return None
    library: Any = importlib.import_module("sentence_transformers")
    encode: Embed = library.SentenceTransformer(str(folder), device="cpu").encode
    return encode


def report(ways: dict[str, Way], texts: list[str], rounds: int) -> None:
    first, *others = [way.embed(texts[:INPUTS]) for way in ways.values()]
    for other in others:
        print(f"largest difference {numpy.abs(first - other).max():.1e}")
    for _ in range(rounds):
        for way in ways.values():
            way.measure(texts)
    print(f"{'texts':<24} a second  a CPU second")
    for name, way in ways.items():
        clock, cpu = way.best
        print(f"{name:<24}{clock:9.1f}{cpu:14.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the encoder's folder")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    folder: Path = arguments.model.absolute()
    texts = draw_texts(arguments.texts)
    tree: dict[str, object] = {
        "embedding_model": str(folder),
        "prefill": {"threads": arguments.threads},
        "decode": {"threads": 1},
        "router": FREE_ROUTER,
    }
    torch.set_num_threads(arguments.threads)
    with (
        tempfile.TemporaryDirectory() as logs,
        workers(Path(logs), tree, ["prefill-0", "decode-0"]) as started,
        router(Path(logs), tree, started.values()) as served,
        Client(served.address) as client,
    ):
        members = [each.pid for each in (*started.values(), served)]
        ways = {"cluster": Way(by_cluster(client, folder.name), members)}
        if other := by_sentence_transformers(folder):
            ways["sentence-transformers"] = Way(other, [os.getpid()])
        report(ways, texts, arguments.rounds)


if __name__ == "__main__":
    main()

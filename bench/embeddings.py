"""Embeddings per second: `python -m bench.embeddings --model FOLDER`.

The same texts of 3 to 60 words, tokenizing included, in turn, on the same number of threads:

- with the encoder in FOLDER: as the embedding model of a cluster (a prefill worker, an idle decode
  worker, a router) over gRPC; with the engine in this process; and with sentence-transformers, or
  transformers if that is not installed, in batches of 32 texts of similar length;
- from a model's last token: in the same ways, with the served model.

On a GPU without a cluster, with random weights in the shapes of all-MiniLM-L6-v2 and of the
embedded model: `python -m bench.embeddings --random --device cuda --no-cluster --texts 8192`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy
import torch

import baton
from baton.core import model_store
from bench.embedding_ways import (
    Embed,
    draw_texts,
    encoder_by_engine,
    encoder_by_others,
    last_token_by_engine,
    last_token_by_transformers,
    save_random_encoder,
    save_random_model,
)

INPUTS = 128
"""Inputs per call."""


def cpu_seconds(process: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


class Way:
    """A way to embed, and the processes that it uses."""

    def __init__(self, embed: Embed, processes: Sequence[int] | None = None) -> None:
        self.embed = embed
        self._processes = processes or [os.getpid()]
        self._speeds: list[tuple[float, float]] = []

    def measure(self, texts: Sequence[str]) -> None:
        began, cpu = time.perf_counter(), self._cpu_seconds
        self.embed(texts)
        taken = time.perf_counter() - began, self._cpu_seconds - cpu
        self._speeds.append((len(texts) / taken[0], len(texts) / max(taken[1], 0.01)))

    @property
    def best(self) -> tuple[float, float]:
        """The most texts per second, by the clock and by CPU time: other load only slows a run."""
        clock, cpu = zip(*self._speeds, strict=True)
        return max(clock), max(cpu)

    @property
    def _cpu_seconds(self) -> float:
        return sum(map(cpu_seconds, self._processes))


def by_cluster(client: baton.Client, name: str, last_token: bool = False) -> Embed:
    def embed(texts: Sequence[str]) -> numpy.ndarray:
        calls = [texts[start : start + INPUTS] for start in range(0, len(texts), INPUTS)]
        pooling: Literal["last"] | None = "last" if last_token else None
        found = [client.embed(each, model=name, pooling=pooling) for each in calls]
        return numpy.concatenate(found)

    return embed


@contextlib.contextmanager
def cluster(served: str, encoder: Path, threads: int) -> Iterator[Callable[[str, bool], Way]]:
    """Starts a cluster. Yields a function from a model's name to a way."""
    from bench.processes import FREE_ROUTER, router, workers  # not needed for an engine alone

    tree: dict[str, object] = {
        "model": served,
        "embedding_model": str(encoder),
        "prefix_cache": False,  # each round has the same texts
        "prefill": {"threads": threads},
        "decode": {"threads": 1},
        "router": FREE_ROUTER,
    }
    with (
        tempfile.TemporaryDirectory() as logs,
        workers(Path(logs), tree, ["prefill-0", "decode-0"]) as started,
        router(Path(logs), tree, started.values()) as process,
        baton.Client(process.address) as client,
    ):
        members = [each.pid for each in (*started.values(), process)]
        yield lambda name, last_token: Way(by_cluster(client, name, last_token), members)


def report(title: str, ways: dict[str, Way], texts: Sequence[str], rounds: int) -> None:
    first, *others = [way.embed(texts[:INPUTS]) for way in ways.values()]
    differences = [f"{numpy.abs(first - other).max():.1e}" for other in others]
    for _ in range(rounds):
        for way in ways.values():
            way.measure(texts)
    print(f"{title}: {len(texts)} texts, largest differences {', '.join(differences)}")
    print(f"{'texts':<40} a second  a CPU second")
    for name, way in ways.items():
        clock, cpu = way.best
        print(f"{name:<40}{clock:9.1f}{cpu:14.1f}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="the encoder's folder")
    parser.add_argument("--served", default=model_store.EMBEDDED, help="model for the last token")
    parser.add_argument("--random", action="store_true", help="random weights for both models")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-cluster", action="store_true", help="only in this process")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--last-token-texts", type=int, default=64, help="0 skips this part")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if not arguments.random and arguments.model is None:
        parser.error("needs --model or --random")
    return arguments


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as running:
        if arguments.random:
            encoder, served = Path(made) / "encoder", Path(made) / "served"
            save_random_encoder(encoder)
            save_random_model(served)
        else:
            encoder, served = arguments.model.absolute(), model_store.locate(arguments.served)
        make_way = None
        if not arguments.no_cluster:
            make_way = running.enter_context(cluster(str(served), encoder, arguments.threads))
        ways = {"cluster": make_way(encoder.name, False)} if make_way else {}
        ways["engine, in one process"] = Way(encoder_by_engine(encoder, device))
        name, other = encoder_by_others(encoder, device)
        ways[name] = Way(other)
        report("encoder", ways, draw_texts(arguments.texts), arguments.rounds)
        if arguments.last_token_texts:
            ways = {"cluster": make_way("", True)} if make_way else {}
            ways["engine, in one process"] = Way(last_token_by_engine(served, device))
            ways["transformers, batches of 32 by length"] = Way(
                last_token_by_transformers(served, device)
            )
            report("last token", ways, draw_texts(arguments.last_token_texts), arguments.rounds)


if __name__ == "__main__":
    main()

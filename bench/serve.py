"""The cost of disaggregation: the whole cluster against one engine alone, on the same cores.

    python -m bench.serve [--model FOLDER] [--repeats 3] [--kv-dtype int8]

Starts a cluster on Ray (router, one prefill worker, one decode worker) and one
engine in its own process, and measures them in turn, row by row, so that other load
affects both. Prompts are random tokens; answers are greedy and never end early. The
client uses gRPC.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection

from baton import Client
from baton.cluster.launch import Cluster, routers
from baton.core import metrics, model_store
from baton.core.config import Config, RouterConfig
from bench.counters import total
from bench.engine import Ours, Prompts, random_prompts

CHUNK = 512
THREADS = 2


class AloneEngine:
    """bench.engine's engine, in its own process."""

    def __init__(self, model: str, kv_dtype: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        asked = (model, kv_dtype, other)
        process = context.Process(target=_serve_engine, args=asked, daemon=True)
        process.start()
        self.seconds(random_prompts(2, 64), 4)

    def seconds(self, prompts: Prompts, count: int) -> float:
        self._pipe.send((prompts, count))
        taken: float = self._pipe.recv()
        return taken

    def stop(self) -> None:
        self._pipe.send(None)


def _serve_engine(model: str, kv_dtype: str, pipe: Connection) -> None:
    engine = Ours(model_store.locate(model), THREADS, CHUNK, kv_dtype=kv_dtype)
    while (asked := pipe.recv()) is not None:
        prompts, count = asked
        began = time.perf_counter()
        engine.generate(prompts, count)
        pipe.send(time.perf_counter() - began)


class WholeCluster:
    """A running cluster, measured by a gRPC client."""

    def __init__(self, address: str) -> None:
        self._client = Client(address)
        self.seconds(random_prompts(2, 64), 4)

    def seconds(self, prompts: Prompts, count: int) -> float:
        """Seconds from sending all prompts to the last token."""
        began = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(lambda prompt: self._ask(prompt, count), prompts))
        taken = time.perf_counter() - began
        assert all(len(answer) == count for answer in answers)
        return taken

    def first_token_seconds(self, prompt: list[int], count: int) -> float:
        """Seconds to the first token of an answer of `count` tokens. Reads the whole answer."""
        began = time.perf_counter()
        with self._client.stream(prompt, max_tokens=count, ignore_eos=True) as stream:
            next(stream)
            taken = time.perf_counter() - began
            stream.read()
        return taken

    def _ask(self, prompt: list[int], count: int) -> tuple[int, ...]:
        return self._client.generate(prompt, max_tokens=count, ignore_eos=True).token_ids


@dataclass(frozen=True)
class Row:
    title: str
    unit: str
    alone: Callable[[], float]
    cluster: Callable[[], float]


def rows(engine: AloneEngine, cluster: WholeCluster) -> list[Row]:
    (long,) = random_prompts(1, 512)
    made = [
        Row(
            "TTFT, 512 tokens",
            "ms",
            lambda: engine.seconds([long], 1) * 1e3,
            lambda: cluster.first_token_seconds(long, 4) * 1e3,
        ),
        Row(
            "decode, one stream",
            "tok/s",
            lambda: _stream_rate(engine.seconds),
            lambda: _stream_rate(cluster.seconds),
        ),
    ]
    for count in (8, 16):
        prompts = random_prompts(count, 256)
        made.append(
            Row(
                f"{count} at once, 256 in, 64 out",
                "tok/s",
                lambda prompts=prompts: _batch_rate(engine.seconds, prompts),  # type: ignore[misc]
                lambda prompts=prompts: _batch_rate(cluster.seconds, prompts),  # type: ignore[misc]
            )
        )
    return made


def _stream_rate(seconds: Callable[[Prompts, int], float]) -> float:
    prompts = random_prompts(1, 128)
    return 64 / (seconds(prompts, 65) - seconds(prompts, 1))


def _batch_rate(seconds: Callable[[Prompts, int], float], prompts: Prompts) -> float:
    return len(prompts) * 64 / seconds(prompts, 64)


def print_rows(table: list[Row], repeats: int) -> None:
    print(f"{'':<28}{'engine alone':>16}{'cluster':>16}{'cluster / alone':>18}")
    for row in table:
        pairs = [(row.alone(), row.cluster()) for _ in range(repeats)]
        alone, cluster = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(ours / theirs for theirs, ours in pairs)
        print(
            f"{row.title:<28}{alone:>10.1f} {row.unit:<5}{cluster:>10.1f} {row.unit:<5}"
            f"{ratio:>17.2f}",
            flush=True,
        )


def print_transfer(cluster: WholeCluster, address: str) -> None:
    """Prints the rate of a push of 512 tokens, and the share of TTFT that waits for it. The router
    serves metrics at `address`."""
    (prompt,) = random_prompts(1, 512)
    names = metrics.TRANSFER_BYTES, metrics.TRANSFER_SECONDS
    before = [total(address, name) for name in names]
    pairs = [
        (cluster.first_token_seconds(prompt, 1), cluster.first_token_seconds(prompt, 4))
        for _ in range(5)
    ]
    size, seconds = (
        total(address, name) - value for name, value in zip(names, before, strict=True)
    )
    share = statistics.median((pushed - bare) / pushed for bare, pushed in pairs)
    print(f"transfer of 512 tokens: {size / 5 / 2**20:.1f} MiB at {size / seconds / 1e9:.1f} GB/s")
    print(f"share of TTFT that the transfer exposes: {share:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=model_store.EMBEDDED, help="a Hugging Face folder")
    parser.add_argument("--repeats", type=int, default=3, help="runs per row; 0: only the transfer")
    parser.add_argument("--kv-dtype", choices=["auto", "int8", "int4"], default="auto")
    options = parser.parse_args()
    config = Config(
        model=options.model,
        kv_dtype=options.kv_dtype,
        prefix_cache=False,  # every row repeats the same prompts
        speculation="off",  # which the engine alone does not have
        router=RouterConfig(port=0, http_port=0, metrics_port=0, local_prefill="fallback"),
    )
    live = Cluster(config)
    try:
        router, *_ = routers(live.start())
        cluster = WholeCluster(router.address)
        if options.repeats:
            engine = AloneEngine(options.model, options.kv_dtype)
            print_rows(rows(engine, cluster), options.repeats)
            engine.stop()
        print_transfer(cluster, router.metrics)
    finally:
        live.stop()


if __name__ == "__main__":
    main()

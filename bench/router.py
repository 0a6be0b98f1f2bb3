"""The cost of the router: `python -m bench.router`.

One router process on one core, between workers that answer at once and clients
that read many answers, which share another core. Prints, for gRPC and for server-sent
events, tokens per second, the router's CPU time per token, and the time from a worker's
write until the client's kernel has the token. Then, from runs under a profiler, where
the router's time goes.

Goals: 20,000 tokens per second with 256 streams; at a tenth of that load, half of all
tokens within 1 ms and 99% within 5 ms. Delays at a tenth of the load depend on how many
tokens come together: a worker sends the tokens of all its answers at once, and the last
of them waits for the others. So it is measured with a tenth of the streams, and with
all streams on many workers, on some and on one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import pstats
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
import yaml
from tokenizers import Tokenizer

from baton.core import model_store
from baton.core.config import Config
from baton.core.types import Role
from bench.instant_worker import InstantWorker, Pace
from bench.processes import FREE_ROUTER, START_SECONDS, STOP_SECONDS
from bench.router_load import Arrivals, Clients, Reading

STREAMS = 256
GOAL = 20_000
PREFILL_WORKERS = 2
DECODE_WORKERS = 8
MANY_DECODE_WORKERS = 64
FIRST_STREAM = 1000  # its number, which is also a token id
SETTLE_SECONDS = 0.5  # between all first tokens and the following ones
TICK = os.sysconf("SC_CLK_TCK")

# A function belongs to the first stage of which a part is in its file's path.
STAGES = (
    ("read the workers' messages", ("router/workers/",)),
    ("wait for workers", ("router/requests/inbox.py",)),
    ("attempts", ("attempt.py", "dispatch.py", "wire.py")),
    ("text", ("router/answers/", "codecs")),
    ("measure", ("metrics.py", "ledger.py", "trends.py", "prometheus_client")),
    ("serve", ("router/requests/serving.py",)),
    ("wait for clients", ("router/edges/client_buffer.py",)),
    ("gRPC messages", ("router/edges/grpc", "grpc/")),
    ("server-sent events", ("router/edges/http", "json/", "starlette")),
    ("HTTP", ("uvicorn", "h11")),
    ("event loop", ("asyncio", "uvloop")),
)
OTHER = "everything else"
# The event loop waits in these.
IDLE = ("asyncio/runners.py", "run")


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` concurrent answers of `tokens_each` tokens, at `rate` tokens per second in total; 0
    is as fast as the router takes them. Decode workers have equally many streams each and step at
    different times."""

    streams: int
    rate: float
    tokens_each: int
    workers: int = DECODE_WORKERS

    @property
    def step_seconds(self) -> float:
        return self.streams / self.rate if self.rate else 0.0

    def __str__(self) -> str:
        pace = f"{self.rate:,.0f} tokens/s" if self.rate else "as fast as it goes"
        together = max(self.streams // self.workers, 1)
        return f"{self.streams} streams, {pace}, {together} together"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Measured from every stream's first token to the last token of all."""

    tokens: int
    messages: int
    seconds: float
    router_seconds: float  # of CPU time
    delays: Sequence[float]  # from a worker's write to a client's kernel
    start_seconds: float  # of CPU time, for each stream's request and its first token

    def __str__(self) -> str:
        percent = statistics.quantiles(self.delays, n=100)
        return (
            f"{self.tokens / self.seconds:>9,.0f} tokens/s"
            f"{self.tokens / self.messages:>7.1f} a message"
            f"{self.router_seconds / self.tokens * 1e6:>8.1f} us of CPU a token"
            f"{self.router_seconds / self.seconds:>7.0%} of a core"
            f"   p50 {percent[49] * 1e3:6.2f} ms   p99 {percent[98] * 1e3:6.2f} ms"
            f"   {self.start_seconds * 1e3:.1f} ms of CPU a request"
        )


class Router:
    """A router process on one core."""

    def __init__(self, config: Path, core: int, profile: Path | None = None) -> None:
        on_core = ["taskset", "-c", str(core)]
        module = ["bench.profiled_router", str(profile)] if profile else ["baton.router"]
        self._profile = profile
        log = config.with_suffix(".log")
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*on_core, sys.executable, "-m", *module, "--config", str(config)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        pattern = re.compile(r"gRPC on (\S+), HTTP on (\S+),")
        deadline = time.monotonic() + START_SECONDS
        while not (found := pattern.search(log.read_text())):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the router did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        self.grpc, self.http = found[1], found[2]

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of all its threads."""
        text = Path(f"/proc/{self._process.pid}/stat").read_text()
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / TICK

    @contextlib.contextmanager
    def profiled(self) -> Iterator[None]:
        """Profiles the router during the block, if it has a file for the profile."""
        if self._profile:
            self._profile.unlink(missing_ok=True)
            self._process.send_signal(signal.SIGUSR1)
        yield
        if self._profile:
            self._process.send_signal(signal.SIGUSR2)
            while not self._profile.exists():
                time.sleep(0.1)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(STOP_SECONDS)


@dataclass(frozen=True, slots=True)
class Bench:
    """Measures one router."""

    edge: str
    router: Router
    clients: Clients
    pace: Pace

    async def measure(self, load: Load) -> Outcome:
        self.pace.sent.clear()
        self.pace.go.clear()
        self.pace.step_seconds = load.step_seconds
        cpu_before = self.router.cpu_seconds
        address = self.router.grpc if self.edge == "gRPC" else self.router.http
        numbers = range(FIRST_STREAM, FIRST_STREAM + load.streams)
        self.clients.begin(Reading(self.edge, address, numbers, load.tokens_each))
        await asyncio.to_thread(self.clients.wait_begun)
        await asyncio.sleep(SETTLE_SECONDS)
        began, cpu_began = time.monotonic(), self.router.cpu_seconds
        with self.router.profiled():
            self.pace.go.set()
            arrivals = await asyncio.to_thread(self.clients.finish)
        cpu_seconds = self.router.cpu_seconds - cpu_began
        arrived = sum(len(item.times) for item in arrivals.values())
        if arrived != load.streams * load.tokens_each:
            raise SystemExit(f"{arrived} of {load.streams * load.tokens_each} tokens arrived")
        return Outcome(
            arrived - load.streams,
            sum(item.messages - 1 for item in arrivals.values()),
            max(item.times[-1] for item in arrivals.values()) - began,
            cpu_seconds,
            _delays(arrivals, self.pace),
            (cpu_began - cpu_before) / load.streams,
        )


def _delays(arrivals: dict[int, Arrivals], pace: Pace) -> list[float]:
    """The delays of all tokens except each stream's first, which comes from prefill, and its last:
    only in this benchmark do all answers end together."""
    return [
        arrived - sent
        for number, item in arrivals.items()
        for arrived, sent in list(zip(item.times[1:], pace.sent[number], strict=True))[:-1]
    ]


@contextlib.asynccontextmanager
async def instant_workers(model: str, pace: Pace, decoders: int) -> AsyncIterator[list[str]]:
    """Starts workers; yields their addresses."""
    prefill = [
        InstantWorker(Role.PREFILL, f"prefill-{index}", model, pace)
        for index in range(PREFILL_WORKERS)
    ]
    decode = [
        InstantWorker(Role.DECODE, f"decode-{index}", model, pace, index / decoders)
        for index in range(decoders)
    ]
    workers = [*prefill, *decode]
    try:
        yield [await worker.start() for worker in workers]
    finally:
        for worker in workers:
            await worker.stop()


def write_config(path: Path, model: str, workers: Sequence[str]) -> None:
    tree = {
        "model": model,
        "drain_seconds": 1,
        "members": {"workers": list(workers)},
        "router": {
            **FREE_ROUTER,
            "local_prefill": "never",
        },
    }
    path.write_text(yaml.safe_dump(tree))


def loads(tokens: int) -> list[Load]:
    slow = GOAL / 10
    return [
        Load(STREAMS, 0, tokens),
        Load(STREAMS, GOAL, tokens),
        Load(STREAMS // 10, slow, tokens),
        Load(STREAMS, slow, tokens // 10),
        Load(STREAMS, slow, tokens // 10, MANY_DECODE_WORKERS),
        Load(STREAMS, slow, tokens // 10, 1),
    ]


async def report(arguments: argparse.Namespace, folder: Path, clients: Clients) -> None:
    pace = Pace(letter(arguments.model))
    asked = loads(arguments.tokens)
    for edge in arguments.edges:
        print(f"\n{edge}")
        setting = Setting(edge, arguments.model, folder, clients, pace)
        for workers, alike in itertools.groupby(asked, key=lambda load: load.workers):
            async with setting.bench(workers) as bench:
                for load in alike:
                    print(f"  {load!s:<46}{await bench.measure(load)}", flush=True)
        # The cost with many tokens per message, and with one.
        for load in (asked[0], asked[3]):
            profile = folder / "profile"
            async with setting.bench(load.workers, profile) as bench:
                outcome = await bench.measure(load)
            print(f"  {load}")
            print_stages(profile, outcome)


def letter(model: str) -> int:
    folder = model_store.locate(model)
    token = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("a")
    assert token is not None
    return token


@dataclass(frozen=True, slots=True)
class Setting:
    edge: str
    model: str
    folder: Path
    clients: Clients
    pace: Pace

    @contextlib.asynccontextmanager
    async def bench(self, workers: int, profile: Path | None = None) -> AsyncIterator[Bench]:
        """A router and `workers` decode workers."""
        model = model_store.model_name(Config(model=self.model))
        async with instant_workers(model, self.pace, workers) as addresses:
            path = self.folder / "router.yaml"
            write_config(path, self.model, addresses)
            router = await asyncio.to_thread(Router, path, 0, profile)
            bench = Bench(self.edge, router, self.clients, self.pace)
            try:
                # Warms up the router.
                await bench.measure(Load(STREAMS, 0, 20))
                yield bench
            finally:
                await asyncio.to_thread(router.stop)


def print_stages(profile: Path, outcome: Outcome) -> None:
    """Prints each stage's share of the CPU time of the router's main thread."""
    seconds: defaultdict[str, float] = defaultdict(float)
    entries = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    for (path, _, function), (_, _, own, _, callers) in entries.items():
        if path.endswith(IDLE[0]) and function == IDLE[1]:
            continue
        if path != "~":
            seconds[stage_of(path)] += own
            continue
        # A C function's time belongs to its callers.
        for (caller, _, _), (_, _, share, _) in callers.items():
            seconds[stage_of(caller)] += share
    total = sum(seconds.values())
    print(f"    {total / outcome.tokens * 1e6:.0f} us a token under the profiler, of which")
    for stage, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"      {stage:<28}{spent / total:>5.0%}{spent / outcome.tokens * 1e6:>8.1f} us")


def stage_of(path: str) -> str:
    found = (name for name, parts in STAGES if any(part in path for part in parts))
    return next(found, OTHER)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=model_store.EMBEDDED, help="whose tokenizer to use")
    parser.add_argument("--tokens", type=int, default=600, help="tokens of each answer")
    parser.add_argument("--edges", nargs="+", default=["gRPC", "HTTP"], choices=["gRPC", "HTTP"])
    arguments = parser.parse_args()
    # Leaves the first core to the router.
    os.sched_setaffinity(0, set(range(1, os.cpu_count() or 2)))
    clients = Clients()
    try:
        with tempfile.TemporaryDirectory() as folder:
            uvloop.run(report(arguments, Path(folder), clients))
    finally:
        clients.close()


if __name__ == "__main__":
    main()

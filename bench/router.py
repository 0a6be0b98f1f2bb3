"""What the router costs: `python -m bench.router`.

One router process on one core, between workers that answer at once and clients
that read many answers at once, which share another core. Printed for gRPC and for
server-sent events: tokens a second, the router's CPU time a token, and the time
from a worker's write to a client's read, which the clients' own time is part of.
Then, from a run under a profiler, where the router's time goes.

Goals: 20,000 tokens a second with 256 streams; at a tenth of that load, half of all
tokens within 1 ms and 99% within 5 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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

from bench.instant_worker import InstantWorker, Pace
from bench.processes import START_SECONDS, STOP_SECONDS
from bench.router_load import Arrivals, Clients, GrpcClients, HttpClients
from core import model_store
from core.config import Config
from core.types import Role

STREAMS = 256
GOAL = 20_000
PREFILL_WORKERS = 2
DECODE_WORKERS = 8
FIRST_STREAM = 1000  # as a token id
TICK = os.sysconf("SC_CLK_TCK")

# Where a function's time is counted: by the first of these that its file's path holds.
STAGES = (
    ("read the workers' messages", ("router/link.py", "router/pace.py", "router/pulse.py")),
    ("attempts", ("router/attempt.py", "router/dispatch.py", "router/feedback.py", "wire.py")),
    ("text", ("router/answer.py", "router/detokenizer.py", "router/stop_strings.py", "codecs")),
    ("measure", ("router/metrics.py", "prometheus_client")),
    ("serve", ("router/serving.py", "router/merge.py", "contextlib.py")),
    ("wait for clients", ("router/reader.py",)),
    ("gRPC messages", ("router/grpc_edge.py", "grpc/")),
    ("server-sent events", ("router/http", "json/", "starlette")),
    ("HTTP", ("uvicorn", "h11")),
    ("event loop", ("asyncio", "uvloop")),
)
OTHER = "everything else"
# Of the event loop's, which waits in there.
IDLE = ("asyncio/runners.py", "run")


@dataclass(frozen=True, slots=True)
class Load:
    """`tokens_each` for so many streams, all at once, at `rate` tokens a second in all; 0 is as
    fast as the router takes them."""

    streams: int
    rate: float
    tokens_each: int

    @property
    def step_seconds(self) -> float:
        return self.streams / self.rate if self.rate else 0.0

    def __str__(self) -> str:
        pace = f"{self.rate:,.0f} tokens/s" if self.rate else "as fast as it goes"
        return f"{self.streams} streams, {pace}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """From when every stream had its first token to when all had their last."""

    tokens: int
    messages: int
    seconds: float
    router_seconds: float  # of CPU time
    delays: Sequence[float]  # from a worker's write to a client's read
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
        module = ["bench.profiled_router", str(profile)] if profile else ["router"]
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
        """Of all its threads, so far."""
        text = Path(f"/proc/{self._process.pid}/stat").read_text()
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / TICK

    @contextlib.contextmanager
    def profiled(self) -> Iterator[None]:
        """While it is, where it is to be."""
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


async def measure(load: Load, clients: Clients, router: Router, pace: Pace) -> Outcome:
    pace.sent.clear()
    pace.go.clear()
    pace.step_seconds = load.step_seconds
    arrivals = {FIRST_STREAM + index: Arrivals() for index in range(load.streams)}
    cpu_before = router.cpu_seconds
    reading = [
        asyncio.ensure_future(clients.read(number, load.tokens_each, arrived))
        for number, arrived in arrivals.items()
    ]
    await asyncio.gather(*(arrived.begun.wait() for arrived in arrivals.values()))
    began, cpu_began = time.monotonic(), router.cpu_seconds
    with router.profiled():
        pace.go.set()
        await asyncio.gather(*reading)
    seconds, cpu_ended = time.monotonic() - began, router.cpu_seconds
    for arrived in arrivals.values():
        if len(arrived.times) != load.tokens_each:
            raise SystemExit(f"{len(arrived.times)} of {load.tokens_each} tokens arrived")
    return Outcome(
        load.streams * (load.tokens_each - 1),
        sum(item.messages - 1 for item in arrivals.values()),
        seconds,
        cpu_ended - cpu_began,
        _delays(arrivals, pace),
        (cpu_began - cpu_before) / load.streams,
    )


def _delays(arrivals: dict[int, Arrivals], pace: Pace) -> list[float]:
    """Of all tokens but each stream's first, which comes from prefill."""
    return [
        arrived - sent
        for number, item in arrivals.items()
        for arrived, sent in zip(item.times[1:], pace.sent[number], strict=True)
    ]


@contextlib.asynccontextmanager
async def instant_workers(model: str, pace: Pace) -> AsyncIterator[list[str]]:
    """Their addresses."""
    prefill = [
        InstantWorker(Role.PREFILL, f"prefill-{index}", model, pace)
        for index in range(PREFILL_WORKERS)
    ]
    decode = [
        InstantWorker(Role.DECODE, f"decode-{index}", model, pace, index / DECODE_WORKERS)
        for index in range(DECODE_WORKERS)
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
            "port": 0,
            "http_port": 0,
            "metrics_port": 0,
            "canary_seconds": 0,
            "local_prefill": "never",
        },
    }
    path.write_text(yaml.safe_dump(tree))


async def report(arguments: argparse.Namespace, folder: Path) -> None:
    config = Config(model=arguments.model)
    tokenizer = Tokenizer.from_file(str(model_store.locate(config.model) / "tokenizer.json"))
    letter = tokenizer.token_to_id("a")
    assert letter is not None
    pace = Pace(letter)
    loads = [
        Load(STREAMS, 0, arguments.tokens),
        Load(STREAMS, GOAL, arguments.tokens),
        Load(STREAMS // 10, GOAL / 10, arguments.tokens),
        Load(STREAMS, GOAL / 10, arguments.tokens // 10),
    ]
    async with instant_workers(model_store.model_name(config), pace) as workers:
        path = folder / "router.yaml"
        write_config(path, arguments.model, workers)
        for name in arguments.edges:
            print(f"\n{name}")
            await _report_loads(name, path, loads, pace)
            cost = await _report_loads(name, path, loads[:1], pace, folder / "profile")
            print_stages(folder / "profile", cost)


async def _report_loads(
    name: str, config: Path, loads: Sequence[Load], pace: Pace, profile: Path | None = None
) -> Outcome:
    router = await asyncio.to_thread(Router, config, 0, profile)
    clients: Clients = GrpcClients(router.grpc) if name == "gRPC" else HttpClients(router.http)
    try:
        # For what is made at first use.
        await measure(Load(STREAMS, 0, 20), clients, router, pace)
        for load in loads:
            outcome = await measure(load, clients, router, pace)
            if profile is None:
                print(f"  {load!s:<34}{outcome}", flush=True)
    finally:
        await clients.close()
        await asyncio.to_thread(router.stop)
    return outcome


def print_stages(profile: Path, outcome: Outcome) -> None:
    """Each stage's share of the time that the router's own thread computes."""
    seconds: defaultdict[str, float] = defaultdict(float)
    entries = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    for (path, _, function), (_, _, own, _, callers) in entries.items():
        if path.endswith(IDLE[0]) and function == IDLE[1]:
            continue
        if path != "~":
            seconds[stage_of(path)] += own
            continue
        # A function of C's is its callers' time.
        for (caller, _, _), (_, _, share, _) in callers.items():
            seconds[stage_of(caller)] += share
    total = sum(seconds.values())
    print(f"  of {total / outcome.tokens * 1e6:.0f} us a token under the profiler:")
    for stage, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"    {stage:<28}{spent / total:>5.0%}{spent / outcome.tokens * 1e6:>8.1f} us")


def stage_of(path: str) -> str:
    found = (name for name, parts in STAGES if any(part in path for part in parts))
    return next(found, OTHER)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=model_store.EMBEDDED, help="whose tokenizer to use")
    parser.add_argument("--tokens", type=int, default=600, help="of each answer")
    parser.add_argument("--edges", nargs="+", default=["gRPC", "HTTP"], choices=["gRPC", "HTTP"])
    arguments = parser.parse_args()
    # The router's core is not ours.
    os.sched_setaffinity(0, set(range(1, os.cpu_count() or 2)))
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(report(arguments, Path(folder)))


if __name__ == "__main__":
    main()

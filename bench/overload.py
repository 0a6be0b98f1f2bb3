"""More requests than the cluster can answer: `python -m bench.overload`.

First the capacity is measured: answers per second with enough callers to keep all workers busy.
Then requests arrive at random times at 0.5 to 4 times that rate, from three tenants with two
priorities, most with a deadline. Goodput is the rate of answers that complete before their
deadline.

Goals: goodput at 4 times the capacity is 90% or more of its peak; refusals come within 50 ms and
say when to try again; admitted requests get their first token within the objective
(`router.ttft`); the router's memory is bounded.

Two clusters: `router`, whose workers compute nothing and have a fixed capacity, so that the router
is measured; and `engine`, one prefill and one decode worker with the embedded model. The first is
also measured at half of its capacity beside idle streams, and beside new connections.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from baton.core import model_store
from baton.core.api_keys import make_key, write_keys
from baton.core.config import Config
from baton.core.process import cancel_all
from baton.core.types import Role
from bench import processes
from bench.instant_worker import InstantWorker, Pace
from bench.overload_clients import KINDS, PROMPT_SECONDS, Callers, Result, Shape, call_http
from bench.overload_connections import Connections, idle_streams, keep_connecting
from bench.processes import FREE_ROUTER, Process
from bench.router import letter

LOADS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
TENANTS = sorted({kind.tenant for kind in KINDS})
ADMIN = "operator"
WARM_UP = 0.25
"""Share of a row's seconds whose answers are not counted."""

IDLE_STREAMS = 10_000
NEW_CONNECTIONS = 2_000.0
HTTP_CALLS = 50
IDLE_SHARE = 0.1
"""Share of a core that an idle router may use."""

MIB = 2**20

# The cluster without engines: its capacity is 40 answers per second.
DECODE_WORKERS = 4
SLOTS = 8
STEP_SECONDS = 0.05
INSTANT_SHAPE = Shape(prompt_tokens=64, answer_tokens=17)
INSTANT_QUEUE_SECONDS = 4.0

ENGINE_SHAPE = Shape(prompt_tokens=64, answer_tokens=16)
ENGINE_QUEUE_SECONDS = 10.0
ENGINE_BATCH = 8


@dataclass(frozen=True, slots=True)
class Target:
    """A running cluster."""

    router: Process
    shape: Shape
    keys: Mapping[str, str]  # by tenant
    busy_callers: int  # enough to keep all workers busy


def router_settings(keys: Path, queue_seconds: float, ttft: float) -> dict[str, object]:
    section = {
        "local_prefill": "never",
        "keys": str(keys),
        "queue_timeout": queue_seconds,
        "ttft": ttft,
    }
    return {"drain_seconds": 1, "router": {**FREE_ROUTER, **section}}


def write_tenants(path: Path) -> dict[str, str]:
    """Writes the tenants' API keys. Returns them by tenant."""
    made = {name: make_key(name) for name in TENANTS}
    made[ADMIN] = make_key(ADMIN, admin=True)
    write_keys(path, [entry for _, entry in made.values()])
    keys = {name: key for name, (key, _) in made.items()}
    os.environ["BATON_API_KEY"] = keys.pop(ADMIN)
    return keys


@contextlib.asynccontextmanager
async def instant_cluster(folder: Path, ttft: float) -> AsyncIterator[Target]:
    path = folder / "keys.yaml"
    keys = write_tenants(path)
    tree = {"model": model_store.EMBEDDED, **router_settings(path, INSTANT_QUEUE_SECONDS, ttft)}
    with contextlib.ExitStack() as running:
        addresses = await asyncio.to_thread(running.enter_context, workers_apart())
        members = [Process(0, address) for address in addresses]
        routing = processes.router(folder, tree, members)
        router = await asyncio.to_thread(running.enter_context, routing)
        yield Target(router, INSTANT_SHAPE, keys, DECODE_WORKERS * SLOTS * 5 // 4)


@contextlib.contextmanager
def workers_apart() -> Iterator[list[str]]:
    """Runs workers in a separate process, so that they do not delay calls. Yields their
    addresses."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=run_workers, args=(theirs,))
    process.start()
    try:
        yield mine.recv()
    finally:
        mine.send("stop")
        process.join()


def run_workers(pipe: Connection) -> None:
    async def run() -> None:
        workers = instant_workers()
        pipe.send([await worker.start() for worker in workers])
        await asyncio.to_thread(pipe.recv)
        for worker in workers:
            await worker.stop()

    uvloop.run(run())


def instant_workers() -> list[InstantWorker]:
    name = model_store.model_name(Config(model=model_store.EMBEDDED))
    pace = Pace(letter(model_store.EMBEDDED), STEP_SECONDS)
    pace.go.set()
    phases = [(index, index / DECODE_WORKERS) for index in range(DECODE_WORKERS)]
    return [
        InstantWorker(Role.PREFILL, "prefill-0", name, pace),
        *(InstantWorker(Role.DECODE, f"decode-{i}", name, pace, p, SLOTS) for i, p in phases),
    ]


@contextlib.asynccontextmanager
async def engine_cluster(folder: Path, ttft: float) -> AsyncIterator[Target]:
    path = folder / "keys.yaml"
    keys = write_tenants(path)
    tree = {"model": model_store.EMBEDDED, "decode": {"max_batch": ENGINE_BATCH}}
    settings = {**tree, **router_settings(path, ENGINE_QUEUE_SECONDS, ttft)}
    with contextlib.ExitStack() as running:
        workers = processes.workers(folder, tree, ["prefill-0", "decode-0"])
        started = await asyncio.to_thread(running.enter_context, workers)
        routing = processes.router(folder, settings, [*started.values()])
        router = await asyncio.to_thread(running.enter_context, routing)
        yield Target(router, ENGINE_SHAPE, keys, 2 * ENGINE_BATCH)


@dataclass(frozen=True, slots=True)
class Row:
    """The results of the requests at one load."""

    results: Sequence[Result]
    seconds: float
    memory: int
    processor_seconds: float  # CPU time of the router

    @property
    def goodput(self) -> float:
        """Answers in time per second, between the warm-up and the last request."""
        end = min(result.due for result in self.results) + self.seconds
        begin = end - (1 - WARM_UP) * self.seconds
        ended = [each.due + each.ended for each in self.results if each.in_time]
        return sum(begin <= at < end for at in ended) / ((1 - WARM_UP) * self.seconds)

    def cells(self, peak: float) -> list[str]:
        results = self.results
        refused = [each for each in results if each.refused]
        firsts = [each.first_token for each in results if each.in_time]
        prompt = [each for each in refused if each.ended <= PROMPT_SECONDS]
        timed = [each for each in refused if each.error and each.error.retry_after]
        late = len(results) - len(refused) - len(firsts)
        return [
            f"{len(results) / self.seconds:.1f}",
            f"{self.goodput:.1f}",
            f"{self.goodput / peak:.0%}" if peak else "",
            f"{len(refused) / len(results):.0%}",
            quantiles([each.ended for each in refused]),
            f"{len(prompt) / len(refused):.1%}" if refused else "",
            f"{len(timed) / len(refused):.0%}" if refused else "",
            f"{late / len(results):.1%}",
            quantiles(firsts),
            f"{self.memory / MIB:.0f}",
            f"{self.processor_seconds / self.seconds:.0%}",
            quantiles([each.lag for each in results]),
        ]

    @property
    def slow_refusals(self) -> dict[str, list[Result]]:
        """Refusals after more than PROMPT_SECONDS, by their messages without numbers."""
        slow = defaultdict(list)
        for each in self.results:
            if each.refused and each.ended > PROMPT_SECONDS:
                slow[re.sub(r"[\d.]+", "#", str(each.error))].append(each)
        return slow


HEADS = (
    "load",
    "requests/s",
    "goodput/s",
    "of peak",
    "refused",
    "refusal ms p50/p99",
    "within 50 ms",
    "retry time",
    "late",
    "TTFT ms p50/p99",
    "router MiB",
    "router CPU",
    "caller's lag ms p50/p99",
)


def quantiles(seconds: Sequence[float]) -> str:
    if len(seconds) < 2:
        return ""
    percent = statistics.quantiles(seconds, n=100)
    return f"{percent[49] * 1e3:.0f} / {percent[98] * 1e3:.0f}"


def print_line(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


class Sweep:
    """Loads one cluster, row by row."""

    def __init__(self, target: Target, callers: Callers, seconds: float) -> None:
        self._target = target
        self._callers = callers
        self._seconds = seconds
        self._capacity = 0.0

    async def run(self, loads: Sequence[float], beside: bool) -> None:
        await self._callers.measure_alone()
        self._capacity = await self._callers.capacity(self._seconds, self._target.busy_callers)
        print(
            f"capacity {self._capacity:.1f} answers/s, {self._callers.alone:.2f} s each when idle\n"
        )
        rows = {f"{load:g}": await self._row(load) for load in loads}
        peak = max(row.goodput for row in rows.values())
        print_line(HEADS)
        print_line(["---"] * len(HEADS))
        for title, row in rows.items():
            print_line([title, *row.cells(peak)])
        for title, row in rows.items():
            for message, slow in row.slow_refusals.items():
                seconds = quantiles([each.ended for each in slow])
                own = sum(each.ended - each.late <= PROMPT_SECONDS for each in slow)
                print(
                    f"refused later at load {title}: {len(slow)} times, after {seconds} ms (p50 /"
                    f" p99), {own} of them for the callers' own lag: {message}"
                )
        print(await self._http(max(loads)))
        if beside:
            await self._beside_idle(peak)
            await self._beside_connections(peak)

    async def _row(self, load: float) -> Row:
        memory, router = 0, self._target.router
        before = router.processor_seconds
        results = asyncio.create_task(self._callers.offer(load * self._capacity, self._seconds))
        while not results.done():
            memory = max(memory, router.memory)
            await asyncio.wait([results], timeout=0.2)
        spent = router.processor_seconds - before
        return Row(results.result(), self._seconds, memory, spent)

    async def _http(self, load: float) -> str:
        """Sends calls over HTTP beside a load, as the tenant with the most requests: a tenant below
        its share is not refused."""
        row = asyncio.create_task(self._row(load))
        await asyncio.sleep(WARM_UP * self._seconds)
        target, key = self._target, self._target.keys[KINDS[0].tenant]
        calls = []
        for _ in range(HTTP_CALLS):
            calls.append(asyncio.create_task(call_http(target.router.http, key, target.shape)))
            await asyncio.sleep((1 - WARM_UP) * self._seconds / HTTP_CALLS)
        ended = await asyncio.gather(*calls)
        await row
        refused = [(seconds, retry) for status, seconds, retry in ended if status != 200]
        return (
            f"HTTP at load {load:g}: {len(refused)} of {HTTP_CALLS} calls refused, in"
            f" {quantiles([seconds for seconds, _ in refused])} ms (p50 / p99),"
            f" {sum(retry for _, retry in refused)} with Retry-After\n"
        )

    async def _beside_idle(self, peak: float) -> None:
        before = self._target.router.memory
        async with idle_streams(self._target.router.address, IDLE_STREAMS) as count:
            row = await self._row(LOADS[0])
        await self._settle()
        print_line([f"0.5, {count:,} idle streams", *row.cells(peak)])
        print(f"memory before: {before / MIB:.0f} MiB")

    async def _settle(self) -> None:
        """Waits until the router has cleaned up streams that have ended."""
        spent, router = 1.0, self._target.router
        while spent > IDLE_SHARE:
            before = router.processor_seconds
            await asyncio.sleep(1.0)
            spent = router.processor_seconds - before

    async def _beside_connections(self, peak: float) -> None:
        for edge, address in {
            "HTTP": self._target.router.http,
            "gRPC": self._target.router.address,
        }.items():
            made = Connections()
            connecting = asyncio.create_task(keep_connecting(address, NEW_CONNECTIONS, made))
            row = await self._row(LOADS[0])
            await cancel_all(connecting)
            rate = made.opened / self._seconds
            print_line([f"0.5, {rate:,.0f} connections/s to {edge}", *row.cells(peak)])
            print(f"{made.failed} connections failed")


CLUSTERS: dict[str, Callable[[Path, float], contextlib.AbstractAsyncContextManager[Target]]] = {
    "router": instant_cluster,
    "engine": engine_cluster,
}


async def report(cluster: str, ttft: float, given: argparse.Namespace) -> None:
    print(f"\n{cluster}, objective for TTFT: {f'{ttft:g} s' if ttft else 'none'}")
    with tempfile.TemporaryDirectory() as folder:
        async with CLUSTERS[cluster](Path(folder), ttft) as target:
            callers = Callers(target.router.address, target.keys, target.shape, given.seed)
            try:
                sweep = Sweep(target, callers, given.seconds)
                await sweep.run(given.loads, beside=cluster == "router" and not given.brief)
            finally:
                await callers.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS), choices=list(CLUSTERS))
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds per row")
    parser.add_argument("--loads", nargs="+", type=float, default=LOADS)
    parser.add_argument(
        "--ttft", nargs="+", type=float, default=[1.0], help="TTFT objectives in seconds; 0 is none"
    )
    parser.add_argument("--brief", action="store_true", help="no idle streams and connections")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for cluster in given.clusters:
        for ttft in given.ttft:
            uvloop.run(report(cluster, ttft, given))


if __name__ == "__main__":
    main()

"""Predicted against measured: a slice of a trace on a live cluster, and the same in the simulator.

    python -m bench.simulate TRACE.jsonl [--requests 60] [--speed 25] [--save profile.json]

The live run's own timings give the profile (bench/profile_fit.py), so this says how well the
simulator puts together what is known of each part: queues, batches, caches and placements.
Prompts are read by prefill workers only and no pages are fetched back, as in the simulator.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from baton import AsyncClient
from baton.v1 import timing_pb2, worker_pb2
from bench import trace_cluster
from bench.profile_fit import PoolShape, fit_profile
from bench.trace import TRACE_OBJECTIVE, chosen_requests
from bench.trace_cluster import Shape
from bench.trace_replay import Outcome, replay, warm_up
from bench.trace_report import Summary, summarize
from bench.trace_workload import FreshPrompts, TimedRequest
from core import model_store
from core.config import Size
from core.page_keys import page_keys
from planner.observation import Goals
from planner.pools import Pools
from planner.profile import Profile
from planner.report import Report
from planner.simulator import Setup, Simulator
from planner.trace import Arrival

MAX_BATCH = 64
SETTINGS = {"local_prefill": "never", "fetch_pages": "never"}


def compare(options: argparse.Namespace) -> None:
    requests = chosen_requests(options, options.seed)
    print(f"{len(requests)} requests in {requests[-1].seconds:.0f} s", flush=True)
    shape = Shape(
        model=options.model,
        prefill=options.prefill,
        decode=options.decode,
        threads=1,
        kv_memory=options.kv_memory,
        page_size=options.page_size,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        trace_cluster.workers(shape, Path(folder)) as members,
        trace_cluster.router(shape, Path(folder), "router", members, SETTINGS) as door,
    ):
        outcomes, profile = asyncio.run(measure(door.address, requests, shape, options.seed))
    if options.save:
        profile.save(options.save)
    print(f"profile: {profile}")
    measured = summarize(outcomes, TRACE_OBJECTIVE, requests[-1].seconds)
    print_comparison(measured, predict(requests, shape, profile))


async def measure(
    address: str, requests: Sequence[TimedRequest], shape: Shape, seed: int
) -> tuple[list[Outcome], Profile]:
    async with AsyncClient(address) as client:
        await warm_up(client, FreshPrompts(seed))
        outcomes = await replay(client, requests)
        if failed := next((each for each in outcomes if each.error), None):
            raise SystemExit(f"the cluster did not answer: {failed.error}")
        recent = await client.recent(len(requests))
        timings = [await client.timing(each.request_id) for each in recent]
        pools = await _pools(client, shape)
    timings.sort(key=_arrival)
    return outcomes, fit_profile(timings, [each.ttft for each in outcomes], pools)


def _arrival(timing: timing_pb2.RequestTiming) -> float:
    return timing.arrived_at


async def _pools(client: AsyncClient, shape: Shape) -> PoolShape:
    workers = (await client.status()).workers
    pages = {worker.member.role: worker.total_pages for worker in workers}
    decode = pages[worker_pb2.ROLE_DECODE]
    return PoolShape(
        page_size=shape.page_size,
        page_bytes=Size.parse(shape.kv_memory) // decode,
        prefill_pages=pages[worker_pb2.ROLE_PREFILL],
        decode_pages=decode,
        max_batch=MAX_BATCH,
    )


def predict(requests: Sequence[TimedRequest], shape: Shape, profile: Profile) -> Report:
    goals = Goals(TRACE_OBJECTIVE.ttft, TRACE_OBJECTIVE.itl, shape.prefill + shape.decode)
    setup = Setup(Pools(shape.prefill, shape.decode), profile, goals, block_tokens=shape.page_size)
    return Simulator(setup).run(arrivals_of(requests, shape.page_size))


def arrivals_of(requests: Sequence[TimedRequest], page_size: int) -> list[Arrival]:
    """Each page is a block, named by its key."""
    return [
        Arrival(
            request.seconds,
            len(request.prompt),
            request.answer_tokens,
            tuple(int.from_bytes(key) for key in page_keys(b"", request.prompt, page_size)),
        )
        for request in requests
    ]


def print_comparison(measured: Summary, predicted: Report) -> None:
    print(f"{'':<22}{'measured':>12}{'predicted':>12}{'error':>10}")
    for title, spread, other in (
        ("TTFT", measured.ttft, predicted.ttft),
        ("ITL", measured.itl, predicted.itl),
    ):
        for name in ("mean", "p50", "p90", "p99"):
            _print_row(
                f"{title} {name}, ms", 1e3 * getattr(spread, name), 1e3 * getattr(other, name)
            )
    hits = measured.cached_tokens / measured.prompt_tokens
    _print_row("hit rate, %", 100 * hits, 100 * predicted.hit_rate)
    kept = measured.good / measured.requests
    _print_row("within objective, %", 100 * kept, 100 * predicted.kept)


def _print_row(title: str, measured: float, predicted: float) -> None:
    error = f"{predicted / measured - 1:+.1%}" if measured else "-"
    print(f"{title:<22}{measured:>12,.1f}{predicted:>12,.1f}{error:>10}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="a JSONL file")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--slice", choices=("sessions", "window"), default="sessions")
    parser.add_argument("--scale", type=Fraction, default=Fraction(1, 32), help="of all lengths")
    parser.add_argument("--speed", type=float, default=25.0, help="times as fast as the trace")
    parser.add_argument("--longest", type=int, default=768, help="leave out longer prompts")
    parser.add_argument("--seed", type=int, default=0, help="of the slice and the tokens")
    parser.add_argument("--model", default=model_store.EMBEDDED, help="a Hugging Face folder")
    parser.add_argument("--prefill", type=int, default=1, help="workers")
    parser.add_argument("--decode", type=int, default=1, help="workers")
    parser.add_argument("--kv-memory", default="1GiB", help="of one worker")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--save", type=Path, help="where to write the profile")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    compare(parser.parse_args())


if __name__ == "__main__":
    main()

"""Predicted against measured: a slice of a trace on a live cluster, and the same in the simulator.

    python -m bench.simulate TRACE.jsonl [--requests 60] [--speed 25] [--save profile.json]
    python -m bench.simulate TRACE.jsonl --seed 1 --decode 2 --profile profile.json

The profile is fitted to the live run's own timings (bench/profile_fit.py), so this shows how well
the simulator combines the known costs of each part: queues, batches, caches and placements. With
--profile, another run's profile shows how well it predicts a run that it has not seen.
Only prefill workers compute prompts and no pages are fetched back, as in the simulator.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from baton import AsyncClient
from baton.core import model_store
from baton.core.config import Config, DecodeConfig, Size, with_device_defaults
from baton.core.page_keys import page_keys
from baton.core.page_reach import Window
from baton.engine.architecture import read_architecture
from baton.planner.profile import Profile, SharedCores, load_profile, weight
from baton.planner.simulation_report import SimulationReport
from baton.planner.simulator import Setup, Simulator
from baton.planner.sizing import Goals, Pools
from baton.planner.trace import TraceRequest
from baton.v1 import timing_pb2, worker_pb2
from bench import trace_cluster
from bench.profile_fit import PoolShape, fit_profile
from bench.trace import TRACE_OBJECTIVE, chosen_requests
from bench.trace_cluster import Shape
from bench.trace_replay import Outcome, replay, warm_up
from bench.trace_report import Objective, summarize
from bench.trace_workload import FreshPrompts, TimedRequest

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
        live = asyncio.run(measure(door.address, requests, shape, options.seed))
    profile = chosen_profile(live, options)
    print_comparison(live.outcomes, TRACE_OBJECTIVE, predict(requests, shape, profile))


@dataclass(frozen=True, slots=True)
class Live:
    began_at: float  # when the first request was due (Unix time)
    outcomes: list[Outcome]
    profile: Profile  # fitted to this run


def chosen_profile(live: Live, options: argparse.Namespace) -> Profile:
    """The given profile, or the live run's own, saved on request."""
    if options.save:
        live.profile.save(options.save)
    if options.profile:
        print(f"profile: {options.profile}")
        return load_profile(options.profile)
    print(f"profile: {live.profile}")
    return live.profile


async def measure(address: str, requests: Sequence[TimedRequest], shape: Shape, seed: int) -> Live:
    async with AsyncClient(address) as client:
        await warm_up(client, FreshPrompts(seed))
        began_at = time.time()
        outcomes = await replay(client, requests)
        if failed := next((each for each in outcomes if each.error), None):
            raise SystemExit(f"the cluster did not answer: {failed.error}")
        recent = await client.recent(len(requests))
        timings = [await client.timing(each.request_id) for each in recent]
        pools = await _pools(client, shape)
    timings.sort(key=_arrival)
    profile = fit_profile(timings, [each.ttft for each in outcomes], pools)
    return Live(began_at, outcomes, profile)


def _arrival(timing: timing_pb2.RequestTiming) -> float:
    return timing.arrived_at


async def _pools(client: AsyncClient, shape: Shape) -> PoolShape:
    workers = (await client.status()).workers
    pages = {worker.member.role: worker.total_pages for worker in workers}
    decode = pages[worker_pb2.ROLE_DECODE]
    return PoolShape(
        page_size=shape.page_size,
        windows=tuple(window or 0 for window in _slices(shape.model)),
        page_bytes=Size.parse(shape.kv_memory) // decode,
        prefill_pages=pages[worker_pb2.ROLE_PREFILL],
        decode_pages=decode,
        max_batch=MAX_BATCH,
        chunk_tokens=with_device_defaults(Config(), "cpu").prefill.chunk_tokens,
        cores=SharedCores(len(os.sched_getaffinity(0)), weight(DecodeConfig().nice)),
    )


def _slices(model: str) -> tuple[Window, ...]:
    return read_architecture(model_store.locate(model)).slices.windows


def predict(requests: Sequence[TimedRequest], shape: Shape, profile: Profile) -> SimulationReport:
    goals = Goals(TRACE_OBJECTIVE.ttft, TRACE_OBJECTIVE.itl, shape.prefill + shape.decode)
    setup = Setup(Pools(shape.prefill, shape.decode), profile, goals, block_tokens=shape.page_size)
    return Simulator(setup).run(arrivals_of(requests, shape.page_size))


def arrivals_of(requests: Sequence[TimedRequest], page_size: int) -> list[TraceRequest]:
    """The requests as the simulator reads them: each page is a block, named by its key."""
    return [
        TraceRequest(
            request.seconds,
            len(request.prompt),
            request.answer_tokens,
            tuple(int.from_bytes(key) for key in page_keys(b"", request.prompt, page_size)),
        )
        for request in requests
    ]


def print_comparison(
    outcomes: Sequence[Outcome], objective: Objective, predicted: SimulationReport
) -> None:
    """Errors of times are relative; errors of shares are percentage points."""
    measured = summarize(outcomes, objective, predicted.seconds)
    print(f"{'':<22}{'measured':>12}{'predicted':>12}{'error':>14}")
    for title, spread, other in (
        ("TTFT", measured.ttft, predicted.ttft),
        ("ITL", measured.itl, predicted.itl),
    ):
        for name in ("mean", "p50", "p90", "p99"):
            _print_times(f"{title} {name}, ms", getattr(spread, name), getattr(other, name))
    _print_shares("hit rate, %", measured.hit_rate, predicted.hit_rate)
    for title, is_met, kept in (
        (f"TTFT within {objective.ttft:g} s", objective.ttft_is_met, predicted.ttft_kept),
        (f"ITL within {objective.itl:g} s", objective.itl_is_met, predicted.itl_kept),
        ("both", objective.is_met, predicted.kept),
    ):
        _print_shares(f"{title}, %", sum(map(is_met, outcomes)) / len(outcomes), kept)


def _print_times(title: str, measured: float, predicted: float) -> None:
    error = f"{predicted / measured - 1:+.1%}" if measured else "-"
    print(f"{title:<22}{1e3 * measured:>12,.1f}{1e3 * predicted:>12,.1f}{error:>14}")


def _print_shares(title: str, measured: float, predicted: float) -> None:
    error = f"{100 * (predicted - measured):+.1f} points"
    print(f"{title:<22}{100 * measured:>12.1f}{100 * predicted:>12.1f}{error:>14}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="a JSONL file")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--slice", choices=("sessions", "window"), default="sessions")
    parser.add_argument("--scale", type=Fraction, default=Fraction(1, 32), help="factor of lengths")
    parser.add_argument("--speed", type=float, default=25.0, help="times as fast as the trace")
    parser.add_argument("--longest", type=int, default=768, help="leave out longer prompts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the slice and the tokens")
    parser.add_argument("--model", default=model_store.EMBEDDED, help="a Hugging Face folder")
    parser.add_argument("--prefill", type=int, default=1, help="workers")
    parser.add_argument("--decode", type=int, default=1, help="workers")
    parser.add_argument("--kv-memory", default="1GiB", help="memory for pages of each worker")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--save", type=Path, help="where to write the live run's profile")
    parser.add_argument("--profile", type=Path, help="predict with another run's profile")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    compare(parser.parse_args())


if __name__ == "__main__":
    main()

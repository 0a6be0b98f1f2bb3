"""Replays a request trace against clusters, policy by policy: hit rates, TTFT, ITL, goodput.

    python -m bench.trace TRACE.jsonl [--policies kv_aware least_loaded round_robin]
    python -m bench.trace TRACE.jsonl --seeds 1 2 3
    python -m bench.trace TRACE.jsonl --address HOST:PORT
    python -m bench.trace --prefix-hit
    python -m bench.trace --sweep

TRACE has one JSON object per line, as the Mooncake traces do: timestamp (ms), input_length,
output_length, and hash_ids of blocks of 512 tokens. Requests are sent at their times (an open
loop), --speed times as fast and --scale times as long; answers are greedy and as long as the
trace says.

A small cluster cannot serve a whole trace. --requests cuts a slice of whole sessions
(requests that share more than the common system prompt), which keeps shared prefixes and
the time between turns: one infinite cache hits 37% of the conversation trace, and 25 to 40%
of such slices of 80 requests. A window in time (--slice window) keeps the density of arrivals
but loses most earlier turns: 4 to 7% of 200 requests.

TTFT counts from when a request was due. The ITL percentiles are over all gaps between two
tokens; an answer is good if its TTFT and the mean of its gaps meet --ttft-slo and --itl-slo.
Each policy gets fresh workers. --address uses a running cluster; give another --seed to send
it new tokens. --seeds runs several slices, one after the other. For each that ran all
policies, and at the end, it prints whether kv_aware has 95% of the hits of an infinite cache
and the lowest mean TTFT.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from baton import AsyncClient
from baton.core import model_store
from baton.planner.trace import read_trace
from bench import trace_cluster
from bench.trace_cluster import Door, Shape
from bench.trace_prefix import print_prefix_hit
from bench.trace_replay import replay, warm_up
from bench.trace_report import KV_AWARE, Objective, Summary, Verdict, print_summaries, summarize
from bench.trace_sweep import MODES, Grid, print_sweep
from bench.trace_workload import (
    FreshPrompts,
    Synthesis,
    TimedRequest,
    infinite_cache_hits,
    sessions,
    slice_of_sessions,
    slice_of_time,
)

POLICIES = (KV_AWARE, "least_loaded", "round_robin")
TRACE_OBJECTIVE = Objective(ttft=4.0, itl=0.25)


def chosen_requests(options: argparse.Namespace, seed: int) -> list[TimedRequest]:
    """The requests of the chosen slice."""
    synthesis = Synthesis(options.scale, options.speed, seed)
    trace = read_trace(options.trace)
    if options.slice == "window":
        fitting = [each for each in trace if synthesis.prompt_length(each) <= options.longest]
        chosen = slice_of_time(fitting, options.requests, seed)
    else:
        # Whole sessions only: without its long turns a session would share less than the trace.
        parts = [
            part
            for part in sessions(trace)
            if max(map(synthesis.prompt_length, part)) <= options.longest
        ]
        chosen = slice_of_sessions(parts, options.requests, seed)
    return synthesis.requests(chosen)


def replay_seeds(options: argparse.Namespace) -> None:
    found = [replay_policies(options, seed) for seed in options.seeds or [options.seed]]
    verdicts = [verdict for verdict in found if verdict]
    if len(verdicts) > 1:
        print(f"holds for {sum(each.holds for each in verdicts)} of {len(verdicts)} seeds")


def replay_policies(options: argparse.Namespace, seed: int) -> Verdict | None:
    """The verdict on one slice; None unless all policies ran."""
    requests = chosen_requests(options, seed)
    prompts = [request.prompt for request in requests]
    tokens = sum(map(len, prompts))
    infinite_rate = infinite_cache_hits(prompts, options.page_size) / tokens
    print(
        f"seed {seed}: {len(requests)} requests in {requests[-1].seconds:.0f} s:"
        f" {tokens:,} prompt tokens (at most {max(map(len, prompts)):,} in one),"
        f" {sum(request.answer_tokens for request in requests):,} answer tokens;"
        f" one infinite cache hits {infinite_rate:.1%}"
    )
    objective = _objective(options) or TRACE_OBJECTIVE
    print(f"objective: TTFT {objective.ttft:g} s, ITL {objective.itl:g} s", flush=True)
    summaries: dict[str, Summary] = {}
    for policy in [options.address] if options.address else options.policies:
        with cluster(options, {"policy": policy}) as door:
            summaries[policy] = asyncio.run(_measure(door, requests, objective, seed))
        print(f"{policy}: done", flush=True)
    print_summaries(summaries, infinite_rate)
    if not set(POLICIES) <= summaries.keys():
        return None
    verdict = Verdict.of(summaries, infinite_rate)
    print(f"seed {seed}: {verdict}", flush=True)
    return verdict


async def _measure(
    door: Door, requests: list[TimedRequest], objective: Objective, seed: int
) -> Summary:
    async with AsyncClient(door.address) as client:
        await warm_up(client, FreshPrompts(seed))
        outcomes = await replay(client, requests)
    # Hits on decode need no baseline: prompts of the warm-up are cached nowhere.
    return summarize(outcomes, objective, requests[-1].seconds, door.decode_cached_tokens())


@contextlib.contextmanager
def cluster(options: argparse.Namespace, settings: dict[str, object]) -> Iterator[Door]:
    """The running cluster at --address, or a fresh one."""
    if options.address:
        yield Door(options.address)
        return
    shape = _shape(options)
    with (
        tempfile.TemporaryDirectory() as folder,
        trace_cluster.workers(shape, Path(folder)) as members,
        trace_cluster.router(shape, Path(folder), "router", members, settings) as door,
    ):
        yield door


def _shape(options: argparse.Namespace) -> Shape:
    return Shape(
        model=options.model,
        prefill=options.prefill,
        decode=options.decode,
        threads=options.threads,
        kv_memory=options.kv_memory,
        page_size=options.page_size,
    )


def measure_prefix_hit(options: argparse.Namespace) -> None:
    with cluster(options, {"policy": options.policies[0]}) as door:
        asyncio.run(print_prefix_hit(door.address, options.repeats, options.seed))


def sweep_modes(options: argparse.Namespace) -> None:
    shape = _shape(options)
    with contextlib.ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        members = running.enter_context(trace_cluster.workers(shape, folder))
        doors = {
            mode: running.enter_context(
                trace_cluster.router(shape, folder, mode, members, {"local_prefill": mode})
            )
            for mode in MODES
        }
        asyncio.run(_sweep(doors, options))


async def _sweep(doors: dict[str, Door], options: argparse.Namespace) -> None:
    grid = Grid(
        lengths=options.lengths,
        loads=options.loads,
        answer_tokens=options.answer_tokens,
        repeats=options.repeats,
        seconds=options.run_seconds,
        least_requests=options.least_requests,
    )
    async with contextlib.AsyncExitStack() as open_clients:
        clients = {
            mode: await open_clients.enter_async_context(AsyncClient(door.address))
            for mode, door in doors.items()
        }
        await print_sweep(clients, grid, options.seed, _objective(options))


def _objective(options: argparse.Namespace) -> Objective | None:
    return Objective(options.ttft_slo, options.itl_slo) if options.ttft_slo else None


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    if bool(options.ttft_slo) != bool(options.itl_slo):
        parser.error("--ttft-slo and --itl-slo go together")
    if options.sweep:
        sweep_modes(options)
    elif options.prefix_hit:
        measure_prefix_hit(options)
    elif options.trace:
        replay_seeds(options)
    else:
        parser.error("give a trace, --prefix-hit or --sweep")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, nargs="?", help="a JSONL file")
    parser.add_argument("--seed", type=int, default=0, help="of the slice, arrivals and tokens")
    parser.add_argument("--ttft-slo", type=float, help="seconds (a trace: 4; a sweep: by length)")
    parser.add_argument("--itl-slo", type=float, help="seconds (a trace: 0.25; a sweep: by length)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of a sweep or a prefix hit")
    _add_trace_options(parser)
    _add_cluster_options(parser)
    _add_experiment_options(parser)
    return parser


def _add_trace_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the trace")
    group.add_argument("--seeds", type=int, nargs="+", help="several slices, instead of --seed")
    group.add_argument("--requests", type=int, default=80)
    group.add_argument("--slice", choices=("sessions", "window"), default="sessions")
    group.add_argument("--scale", type=Fraction, default=Fraction(1, 32), help="factor of lengths")
    group.add_argument("--speed", type=float, default=25.0, help="times as fast as the trace")
    group.add_argument("--longest", type=int, default=768, help="leave out longer prompts")


def _add_cluster_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the cluster")
    group.add_argument("--address", help="a running cluster; otherwise each policy gets a new one")
    group.add_argument("--policies", nargs="+", default=POLICIES)
    group.add_argument("--model", default=model_store.EMBEDDED, help="a Hugging Face folder")
    group.add_argument("--prefill", type=int, default=2, help="workers")
    group.add_argument("--decode", type=int, default=2, help="workers")
    group.add_argument("--threads", type=int, default=1, help="threads of each worker")
    group.add_argument("--kv-memory", default="2GiB", help="memory for pages of each worker")
    group.add_argument("--page-size", type=int, default=16)


def _add_experiment_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("instead of a trace")
    group.add_argument("--prefix-hit", action="store_true", help="TTFT of a prefix, cold and warm")
    group.add_argument("--sweep", action="store_true", help="local prefill auto, never and always")
    group.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 384])
    group.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.9])
    group.add_argument("--answer-tokens", type=int, default=16)
    group.add_argument("--run-seconds", type=float, default=15.0)
    group.add_argument("--least-requests", type=int, default=8, help="fewest requests of one run")


if __name__ == "__main__":
    main()

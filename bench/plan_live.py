"""The planner on a live cluster, and the same slice of a trace in the simulator.

    python -m bench.plan_live TRACE.jsonl --requests 60 --prefill 1 --decode 2 [--ttft 2 --itl 0.3]

A local cluster on Ray serves the slice while the planner switches its workers' roles (it may not
add workers). Then the simulator serves the same requests with the same planner, on a profile
fitted to the live run (or another run's, --profile). Prints the decisions of both, whether they
are the same, and the times of both.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections.abc import Sequence

from baton import Client
from baton.cluster.launch import Cluster, routers
from baton.core import config as configs
from baton.core.config import Config
from baton.planner.profile import Profile
from baton.planner.simulation_report import SimulationReport
from baton.planner.simulator import Setup, Simulator
from baton.planner.sizing import Goals, Pools
from bench.plan_changes import agreement, live_change, print_changes, simulated_change
from bench.simulate import (
    MAX_BATCH,
    SETTINGS,
    add_arguments,
    arrivals_of,
    chosen_profile,
    measure,
    print_comparison,
)
from bench.trace import chosen_requests
from bench.trace_cluster import Shape
from bench.trace_report import Objective
from bench.trace_workload import TimedRequest, with_loads

SWITCH_SECONDS = 0.05
"""How long a role switch takes after the drain, on a CPU."""


def compare(options: argparse.Namespace) -> None:
    requests = with_loads(chosen_requests(options, options.seed), options.load)
    print(f"{len(requests)} requests in {requests[-1].seconds:.0f} s", flush=True)
    shape = Shape(
        options.model, options.prefill, options.decode, 1, options.kv_memory, options.page_size
    )
    cluster = Cluster(_config(shape, options))
    try:
        router, *_ = routers(cluster.start())
        address = router.address
        live = asyncio.run(measure(address, requests, shape, options.seed))
        with Client(address) as client:
            rounds = client.plan().changes
    finally:
        cluster.stop()
    report = _predict(requests, shape, chosen_profile(live, options), options)
    made = [live_change(each, live.began_at) for each in reversed(rounds)]
    planned = [simulated_change(each) for each in report.decisions]
    print_changes("live", made)
    print_changes("simulated", planned)
    print(agreement(made, planned))
    print_comparison(live.outcomes, Objective(options.ttft, options.itl), report)


def _config(shape: Shape, options: argparse.Namespace) -> Config:
    tree = shape.tree()
    pool = {"threads": shape.threads, "kv_memory": shape.kv_memory}
    return configs.parse(
        {
            **tree,
            "prefill": {**pool, "workers": shape.prefill},
            "decode": {**pool, "workers": shape.decode, "max_batch": MAX_BATCH},
            "router": {"port": 0, "http_port": 0, "metrics_port": 0, **SETTINGS},
            "planner": {
                "enabled": True,
                "ttft": options.ttft,
                "itl": options.itl,
                "round_seconds": options.round_seconds,
            },
        }
    )


def _predict(
    requests: Sequence[TimedRequest], shape: Shape, profile: Profile, options: argparse.Namespace
) -> SimulationReport:
    setup = Setup(
        Pools(shape.prefill, shape.decode),
        dataclasses.replace(profile, switch_seconds=SWITCH_SECONDS),
        Goals(options.ttft, options.itl, shape.prefill + shape.decode),
        plans=True,
        block_tokens=shape.page_size,
        round_seconds=options.round_seconds,
    )
    return Simulator(setup).run(arrivals_of(requests, shape.page_size))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--ttft", type=float, default=2.0, help="the objective, in seconds")
    parser.add_argument("--itl", type=float, default=0.3, help="the objective, in seconds")
    parser.add_argument(
        "--load",
        type=float,
        nargs="+",
        default=[1.0],
        help="factors of the arrival rate, for equal parts of the time: 1 2 1 0.5",
    )
    parser.add_argument("--round-seconds", type=float, default=5.0)
    parser.set_defaults(prefill=1, decode=2)
    compare(parser.parse_args())


if __name__ == "__main__":
    main()

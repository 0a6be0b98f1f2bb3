"""What each part of the cost model contributes: `python -m bench.ablation [TRACE.jsonl]`.

Removes one coefficient or fit at a time from the policy's cost model and replays the same
requests. Without a trace: two prefill and two decode workers in virtual time, whose costs are
learned as a router learns them (tests/support/shared_cores.py). With a trace: the planner's
simulator, whose costs are known.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from baton.planner.profile import H200_8B
from baton.planner.simulator import Setup, Simulator
from baton.planner.sizing import Goals, Pools
from baton.planner.trace import TraceRequest, Traffic, arrivals, read_trace
from baton.router.placement.cost_model import ANSWER_PRIOR, CostModel, Costs
from baton.router.placement.placement import LocalPrefill, Snapshot
from tests.support.shared_cores import GPUS, SHARED_CORES, Cluster, Hardware, calibrate, outcome

Change = Callable[[Costs], Costs]

LEARNED = {
    "cores, 32": (SHARED_CORES, (32, 16)),
    "cores, 128": (SHARED_CORES, (128, 16)),
    "GPUs, 4096": (GPUS, (4096, 32)),
}
"""The hardware, and the tokens of prompts and answers."""
LOAD = 0.9

# Other cases: a network of 1 GB/s, and pools that share hardware, where prefill slows decode down.
REPLAYED = {
    "40 GB/s": H200_8B,
    "1 GB/s": dataclasses.replace(H200_8B, transfer=(1e-3, 1e-9)),
    "shared": dataclasses.replace(H200_8B, step=(4.15e-3, 1.2e-5, 4.5e-7, 4e-3)),
}
WORKERS = Pools(4, 2)
GOALS = Goals(ttft=4.0, itl=0.05, most_workers=6)


def without(name: str, place: int, value: float = 0.0) -> Change:
    """A change that sets one coefficient to `value`."""

    def change(costs: Costs) -> Costs:
        values = list(getattr(costs, name))
        values[place] = value
        changed: dict[str, Any] = {name: tuple(values)}
        return dataclasses.replace(costs, **changed)

    return change


def _pending_as_own(costs: Costs) -> Costs:
    """Makes queued tokens cost as much as the prompt's own."""
    prefill, local = (each._replace(queued=each.token) for each in (costs.prefill, costs.local))
    return dataclasses.replace(costs, prefill=prefill, local=local)


def _local_as_prefill(costs: Costs) -> Costs:
    return dataclasses.replace(costs, local=costs.prefill._replace(beside=costs.local.beside))


CHANGES: dict[str, Change] = {
    "nothing": lambda costs: costs,
    "prompt: once": without("prefill", 0),
    "prompt: attention": without("prefill", 2),
    "prompt: own rate of the queue": _pending_as_own,
    "local: own fit": _local_as_prefill,
    "local: busy prefill workers": without("local", 5),
    "transfer: once": without("transfer", 0),
    "transfer: bytes": without("transfer", 1),
    "exposed: once": without("exposed", 0),
    "exposed: share": without("exposed", 1, 1.0),
    "step: requests": without("step", 1),
    "step: pages": without("step", 2),
    "step: busy prefill workers": without("step", 3),
    "interference": lambda costs: dataclasses.replace(costs, interfered=0.0),
    "answer length": lambda costs: dataclasses.replace(costs, answer_tokens=ANSWER_PRIOR),
}


class AblatedModel(CostModel):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self._change = change

    @property
    def costs(self) -> Costs:
        return self._change(super().costs)


class AblatedSimulator(Simulator):
    """A simulator whose policy uses changed costs; its workers keep theirs."""

    def __init__(self, setup: Setup, change: Change) -> None:
        super().__init__(setup)
        self._change = change

    def snapshot(self, arrival: TraceRequest) -> Snapshot:
        snapshot = super().snapshot(arrival)
        return dataclasses.replace(snapshot, costs=self._change(snapshot.costs))


def learned(change: Change, seeds: int) -> Iterator[str]:
    """Yields for each case the share of good requests and the mean seconds of a request."""
    for hardware, shape in LEARNED.values():
        found = calibrate(hardware, *shape)
        made = partial(_ablated_cluster, hardware, change)
        measured = outcome(made, found, LOAD, shape, seeds)
        yield f"{measured.good:.1%}, {measured.seconds:.3g} s"


def _ablated_cluster(hardware: Hardware, change: Change) -> Cluster:
    return Cluster(hardware, LocalPrefill.AUTO, model=AblatedModel(change))


def replayed(change: Change, requests: Sequence[TraceRequest]) -> Iterator[str]:
    """Yields for each case the share of requests that meet both objectives, and the mean TTFT."""
    for profile in REPLAYED.values():
        report = AblatedSimulator(Setup(WORKERS, profile, GOALS), change).run(requests)
        yield f"{report.kept:.1%}, {report.ttft.mean:.3f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?", help="replayed in the planner's simulator")
    parser.add_argument("--seeds", type=int, default=8, help="runs per case with learned costs")
    parser.add_argument("--minutes", type=float, default=15.0, help="minutes of the trace")
    arguments = parser.parse_args()
    cases = list(REPLAYED if arguments.trace else LEARNED)
    if arguments.trace:
        traffic = Traffic(seconds=60 * arguments.minutes)
        requests = list(arrivals(read_trace(arguments.trace), traffic))
    print(f"| without | {' | '.join(cases)} |")
    print("|---" * (len(cases) + 1) + "|")
    for name, change in CHANGES.items():
        found = replayed(change, requests) if arguments.trace else learned(change, arguments.seeds)
        print(f"| {name} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()

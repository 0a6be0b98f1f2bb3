"""`baton plan`: what the planner has decided lately, and why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

import typer

from baton import Client
from baton.cli import options
from baton.cli.edge import edge
from baton.cli.terminal import print_json
from baton.connection import DEFAULT_ADDRESS
from baton.core.proto_json import to_json
from baton.v1 import cluster_pb2


def plan(
    limit: Annotated[int, typer.Option(min=1, help="Of the changes, how many to show.")] = 10,
    as_json: options.AsJson = False,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Show what the planner has decided lately, and why."""
    with edge(), Client(address) as client:
        planned = client.plan()
        if as_json:
            print_json(to_json(planned))
            return
        late = [worker for worker in client.pools().workers if not worker.ready]
    for line in _lines(planned, late, limit, time.time()):
        typer.echo(line)


def _lines(
    planned: cluster_pb2.PlanResponse,
    late: list[cluster_pb2.PooledWorker],
    limit: int,
    now: float,
) -> Iterator[str]:
    """`late` are the workers that do not serve yet, or not any more."""
    if not planned.enabled:
        yield "no planner runs here; `baton serve --plan` starts one"
        return
    acts = "changes the pools" if planned.acts else "only tells what it would do"
    yield (
        f"the planner {acts}: first token within {planned.ttft:g} s, {1e3 * planned.itl:g} ms"
        f" between two, at least {planned.least_prefill} + {planned.least_decode} workers, at"
        f" most {planned.most_workers}"
    )
    if planned.HasField("last"):
        yield from _round(planned.last, "now", now)
    for worker in late:
        yield f"            {worker.worker_id}: {worker.error or worker.progress}"
    for change in planned.changes[:limit]:
        yield from _round(change, "", now)


def _round(made: cluster_pb2.PlannedRound, title: str, now: float) -> Iterator[str]:
    when = title or f"{max(0.0, now - made.at):,.0f} s ago"
    have = f"{made.have_prefill} + {made.have_decode} workers"
    yield typer.style(f"{when:>10}  {made.words}", bold=True) + f"  ({have})"
    yield from (f"            {reason}" for reason in made.reasons)

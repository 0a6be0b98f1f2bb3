"""`baton simulate`: what a cluster would do with a trace, without one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.edge import edge
from baton.cli.terminal import print_json


def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE.jsonl", help="As Mooncake's traces are.")],
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1,
    profile: Annotated[
        Path | None,
        typer.Option(help="What a worker costs: a JSON file. (default: an H200 with an 8B model)"),
    ] = None,
    ttft_slo: Annotated[float, typer.Option(help="Seconds to the first token.")] = 4.0,
    itl_slo: Annotated[float, typer.Option(help="Seconds between two tokens.")] = 0.05,
    copies: Annotated[int, typer.Option(min=1, help="Of the trace, played at once.")] = 1,
    minutes: Annotated[
        float | None, typer.Option(help="How long to play it, again and again. (default: once)")
    ] = None,
    load: Annotated[
        str, typer.Option(help="Times as dense, for equal parts of that time: 1,2,1,0.5.")
    ] = "1",
    plan: Annotated[
        bool, typer.Option("--plan", help="Have the planner change the workers, and say why.")
    ] = False,
    max_workers: Annotated[
        int | None, typer.Option(help="The planner's limit. (default: twice those at the start)")
    ] = None,
    least_prefill: Annotated[
        int, typer.Option(min=1, help="Prefill workers that the planner keeps.")
    ] = 1,
    least_decode: Annotated[
        int, typer.Option(min=1, help="Decode workers that the planner keeps.")
    ] = 1,
    as_json: options.AsJson = False,
) -> None:
    """Simulate a cluster that serves a trace: hit rate, TTFT, ITL, goodput, use of the pools."""
    from baton.cli import simulation
    from baton.planner.sizing import Goals, Pools
    from baton.planner.trace import Traffic

    with edge():
        workers = Pools(prefill, decode)
        least = Pools(least_prefill, least_decode)
        goals = Goals(ttft_slo, itl_slo, max_workers or 2 * workers.total, least=least)
        seconds = 60.0 * minutes if minutes else None
        traffic = Traffic(copies, seconds, simulation.parse_loads(load))
        report = simulation.run(trace, traffic, workers, goals, profile, plan)
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        for line in simulation.lines(report, goals):
            typer.echo(line)

"""`baton bench`: load on a server, and how it bore it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import options
from baton.cli.edge import edge, note
from baton.cli.load_shapes import LENGTHS_HELP, Lengths, Shape
from baton.cli.terminal import console, print_json
from baton.connection import API_KEY_VARIABLE

if TYPE_CHECKING:
    from baton.cli.load_client import Call, Target

DEFAULT_URL = "http://127.0.0.1:8000"


def bench(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Any server that speaks the OpenAI API.")
    ] = DEFAULT_URL,
    requests: Annotated[int, typer.Option(min=1, help="How many to send.")] = 100,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Closed loop: so many at once, the next as one ends.")
    ] = 8,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Open loop: so many a second, however long they take."),
    ] = None,
    constant: Annotated[
        bool, typer.Option("--constant", help="Open loop: evenly, not as a Poisson process.")
    ] = False,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="LENGTH", help=f"About so many: {LENGTHS_HELP}.")
    ] = "128",
    output_tokens: Annotated[
        str, typer.Option(metavar="LENGTH", help="The same, of the answers.")
    ] = "64",
    shared_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens that all prompts begin with.")
    ] = 0,
    ignore_eos: Annotated[
        bool,
        typer.Option(help="Go on past end tokens; off for servers that refuse unknown fields."),
    ] = True,
    slo_ttft: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="A good answer's first token.")
    ] = 0.0,
    slo_tpot: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="A good answer's time per token.")
    ] = 0.0,
    model: Annotated[str, typer.Option(help="(default: the first that the server names)")] = "",
    api_key: Annotated[
        str | None, typer.Option(help=f"(default: {API_KEY_VARIABLE})", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed asks the same.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw the times (needs baton-llm[plot]).")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Put load on a server, and tell TTFT, ITL, end-to-end times and goodput."""
    with edge():
        from baton.cli import load_client, load_report

        shape = Shape(
            requests,
            Lengths.parse(prompt_tokens),
            Lengths.parse(output_tokens),
            shared_tokens,
            rate or 0.0,
            not constant,
            seed,
        )
        key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
        base = load_client.base_url(url)
        named = model or load_client.served_model(base, key)
        target = load_client.Target(base, named, key, ignore_eos)
        calls = _run(target, shape, concurrency)
        objective = load_report.Objective(slo_ttft, slo_tpot)
        report = load_report.Report.of(calls, objective)
        if plot:
            load_report.plot(calls, plot)
            note(f"the picture is {plot}")
        if as_json:
            print_json({"url": base, "model": named, **report.fields()})
        else:
            console().print(load_report.render(report, objective))
    raise typer.Exit(1 if report.failed == report.requests else 0)


def _run(target: Target, shape: Shape, concurrency: int) -> list[Call]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from baton.cli import load_run

    loads = shape.loads()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[told]}"),
    )
    tokens = failed = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("answered", total=len(loads), told="")

        def told(call: Call) -> None:
            nonlocal tokens, failed
            tokens += call.output_tokens
            failed += bool(call.error)
            progress.update(
                task,
                advance=1,
                told=f"{tokens:,} tokens" + (f", {failed} failed" if failed else ""),
            )

        if shape.rate:
            return asyncio.run(load_run.open_loop(target, loads, told))
        return asyncio.run(load_run.closed_loop(target, loads, concurrency, told))

"""`baton doctor`: whether this host can serve, and how pages would travel on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.edge import edge
from core import config as configs

if TYPE_CHECKING:
    from cli.doctor_checks import Check

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The cluster's YAML file.")
    ] = None,
) -> None:
    """Check this host: devices, packages, model, ports, and how fast pages travel."""
    with edge():
        from cli.doctor_checks import run_checks

        worst = 0
        for check in run_checks(configs.load(config)):
            _print(check)
            worst = max(worst, check.verdict == "fail")
    raise typer.Exit(worst)


def _print(check: Check) -> None:
    verdict = typer.style(f"{check.verdict:5}", fg=_COLOURS[check.verdict])
    typer.echo(f"{verdict}{check.subject:13}{check.finding}")
    if check.advice:
        typer.echo(f"{'':18}{check.advice}")

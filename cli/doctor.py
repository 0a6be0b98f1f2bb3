"""`baton doctor`: whether this host can serve, and how pages would travel on it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import options
from baton.cli.edge import edge
from baton.cli.terminal import print_json
from baton.core import config as configs

if TYPE_CHECKING:
    from baton.cli.doctor_checks import Check

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The cluster's YAML file.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Check this host: devices, packages, model, ports, and how fast pages travel."""
    with edge():
        from baton.cli.doctor_checks import run_checks

        checks = []
        for check in run_checks(configs.load(config)):
            checks.append(check)
            if not as_json:
                _print(check)
    if as_json:
        print_json([dataclasses.asdict(check) for check in checks])
    raise typer.Exit(any(check.verdict == "fail" for check in checks))


def _print(check: Check) -> None:
    verdict = typer.style(f"{check.verdict:5}", fg=_COLOURS[check.verdict])
    typer.echo(f"{verdict}{check.subject:13}{check.finding}")
    if check.advice:
        typer.echo(f"{'':18}{check.advice}")

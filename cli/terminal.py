"""Where tables, drawings and JSON go."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 160
"""Columns where there is no terminal to fit, so that a pipe sees whole cells."""


def console() -> Console:
    from rich.console import Console

    made = Console()
    if not made.is_terminal:
        made.width = _PIPE_WIDTH
    return made


def print_json(value: object) -> None:
    """For scripts: on stdout, whole and alone."""
    typer.echo(json.dumps(value, indent=2))

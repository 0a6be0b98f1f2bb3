"""Where tables, drawings and JSON go."""

from __future__ import annotations

import enum
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


def print_json(value: object, *, in_a_line: bool = False) -> None:
    """For scripts: on stdout, whole and alone."""
    indent = None if in_a_line else 2
    typer.echo(json.dumps(value, indent=indent, ensure_ascii=False, default=_name))


def _name(value: enum.Enum) -> str:
    return value.name.lower()

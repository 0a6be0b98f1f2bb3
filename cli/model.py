"""`baton model`: the models on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import model_pull
from cli.edge import edge, note
from core.model_store import EMBEDDED, locate

model = typer.Typer(help="Fetch and find models.", no_args_is_help=True)


@model.command()
def pull() -> None:
    """Fetch the small model that Baton runs when no other is named."""
    with edge():
        typer.echo(model_pull.pull(note))


@model.command()
def path(
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's folder, or the small model.")
    ] = EMBEDDED,
) -> None:
    """Print the folder of a model."""
    with edge():
        typer.echo(locate(name))

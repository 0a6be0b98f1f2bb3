"""`baton model`: the models on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli import model_pull, options
from baton.cli.edge import edge, note
from baton.cli.terminal import print_json
from baton.core.model_store import EMBEDDED, locate

model = typer.Typer(help="Fetch and find models.", no_args_is_help=True)


@model.command()
def pull(as_json: options.AsJson = False) -> None:
    """Fetch the small model that Baton runs when no other is named, and print its folder."""
    with edge():
        _tell(model_pull.pull(note), as_json)


@model.command()
def path(
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's folder, or the small model.")
    ] = EMBEDDED,
    as_json: options.AsJson = False,
) -> None:
    """Print the folder of a model."""
    with edge():
        _tell(locate(name), as_json)


def _tell(folder: Path, as_json: bool) -> None:
    if as_json:
        print_json({"folder": str(folder)})
    else:
        typer.echo(folder)

"""`baton leave`: has a machine's workers go on elsewhere, before the machine goes."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli import options
from baton.cli.edge import edge
from baton.cli.terminal import print_json


def leave(
    ray_address: Annotated[str, typer.Option(help="The Ray cluster.")] = "auto",
    host: Annotated[
        str, typer.Option(help="The machine's address in Ray. (default: this one's)")
    ] = "",
    wait: Annotated[
        float, typer.Option(help="How long to wait for its workers to be gone, in seconds.")
    ] = 60.0,
    as_json: options.AsJson = False,
) -> None:
    """Have the workers of a machine finish or hand back what runs, and start elsewhere."""
    with edge():
        from baton.cluster.stopping import leave_node

        left = leave_node(ray_address, host, wait)
    if as_json:
        print_json({"workers": left, "left": True})
    else:
        for name in left:
            typer.echo(f"{name} has left")

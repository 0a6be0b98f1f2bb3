"""`baton status`: what a router knows of the cluster."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from baton import BatonError, Client
from baton.cli import options
from baton.cli.edge import edge
from baton.cli.terminal import console, print_json
from baton.connection import DEFAULT_ADDRESS
from baton.core.proto_json import to_json

if TYPE_CHECKING:
    from rich.console import RenderableType

_REFRESH_SECONDS = 1.0


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Refresh once a second.")] = False,
    as_json: options.AsJson = False,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Show the router and its workers."""
    if watch and as_json:
        raise typer.BadParameter("choose one", param_hint="--watch / --json")
    with edge(), Client(address) as client:
        if as_json:
            print_json(to_json(client.status()))
        elif watch:
            _watch(client)
        else:
            _print_table(client)


def _print_table(client: Client) -> None:
    from baton.cli.status_table import render

    console().print(render(client.status(), client.address))


def _watch(client: Client) -> None:
    from rich.live import Live

    with Live(console=console(), auto_refresh=False) as live:
        while True:
            live.update(_frame(client), refresh=True)
            time.sleep(_REFRESH_SECONDS)


def _frame(client: Client) -> RenderableType:
    """The table, or in its place what is wrong: a router may come back."""
    from rich.text import Text

    from baton.cli.status_table import render

    try:
        return render(client.status(timeout=_REFRESH_SECONDS), client.address)
    except BatonError as error:
        return Text(error.message, style="red")

"""`baton top`: the cluster, live."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from baton import BatonError, Client, PermissionDenied
from baton.cli import options
from baton.cli.edge import edge
from baton.cli.terminal import console, print_json
from baton.connection import DEFAULT_ADDRESS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from baton.cli.top_picture import Picture

_PATIENCE_SECONDS = 2.0


def top(
    seconds: Annotated[
        float, typer.Option(min=0.2, metavar="SECONDS", help="Between two looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what a picture is made of, and end.")
    ] = False,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Watch the cluster: pools, what holds it back, the last minutes, the latest requests."""
    with edge(), Client(address) as client:
        if as_json:
            print_json(_picture(client).fields())
        elif once:
            console().print(_picture(client).render())
        else:
            _watch(client, seconds)


def _watch(client: Client, seconds: float) -> None:
    from rich.live import Live

    with Live(console=console(), auto_refresh=False, screen=console().is_terminal) as live:
        while True:
            live.update(_frame(client), refresh=True)
            time.sleep(seconds)


def _frame(client: Client) -> RenderableType:
    """The picture, or in its place what is wrong: a router may come back."""
    from rich.text import Text

    try:
        return _picture(client).render()
    except BatonError as error:
        return Text(error.message, style="red")


def _picture(client: Client) -> Picture:
    from baton.cli.top_picture import Picture

    try:
        recent = client.recent(8, timeout=_PATIENCE_SECONDS)
    except PermissionDenied:
        recent = []  # who asked what is for admins
    return Picture(
        client.address,
        client.status(timeout=_PATIENCE_SECONDS),
        client.diagnose(timeout=_PATIENCE_SECONDS),
        client.trends(timeout=_PATIENCE_SECONDS),
        recent,
    )

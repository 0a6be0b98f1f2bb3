"""`baton cache`: the response cache."""

from __future__ import annotations

import typer
from typer import Option

from baton import Client
from baton.cli.terminal import Address, AsJson, print_result
from baton.connection import DEFAULT_ADDRESS

cache = typer.Typer(help="Manage the response cache.", no_args_is_help=True)


@cache.callback()
def _group() -> None:
    """Keeps `clear` a command of its own while it is the only one."""


@cache.command()
def clear(
    tenant: str | None = Option(
        None, metavar="NAME", help="Only answers to requests with this API key. (default: all)"
    ),
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Delete cached answers: those in Redis, or else in the router's memory."""
    with Client(address) as client:
        deleted = client.clear_responses(tenant)
    whose = "" if tenant is None else f" of {tenant}"
    print_result({"responses": deleted}, f"{deleted} responses{whose} deleted", as_json)

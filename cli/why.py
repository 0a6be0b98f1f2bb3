"""`baton why`: where the time of a request went."""

from __future__ import annotations

from typing import Annotated

import typer

from baton import Client
from baton.cli import options
from baton.cli.edge import edge
from baton.cli.terminal import console, print_json
from baton.connection import DEFAULT_ADDRESS
from baton.core.proto_json import to_json
from baton.v1 import timing_pb2


def why(
    request_id: Annotated[
        str | None,
        typer.Argument(metavar="REQUEST_ID", help="As x-request-id has it; none lists the latest."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many to list.")] = 20,
    as_json: options.AsJson = False,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Show where a request's time went, phase by phase."""
    with edge(), Client(address) as client:
        if request_id is None:
            _list(client.recent(limit), as_json)
        else:
            _draw(client.timing(request_id), as_json)


def _list(requests: list[timing_pb2.RequestTiming], as_json: bool) -> None:
    from baton.cli.waterfall import request_table

    if as_json:
        print_json([to_json(request) for request in requests])
    elif requests:
        console().print(request_table(requests))
    else:
        typer.echo("no requests yet")


def _draw(request: timing_pb2.RequestTiming, as_json: bool) -> None:
    from baton.cli.waterfall import waterfall

    if as_json:
        print_json(to_json(request))
    else:
        console().print(waterfall(request))

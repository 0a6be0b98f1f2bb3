"""`baton status`, `top`, `why` and `diagnose`: the cluster as a router sees it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import typer
from typer import Argument, Option

from baton import Client, PermissionDenied
from baton.cli.terminal import (
    Address,
    AsJson,
    console,
    print_json,
    print_lines,
    refresh,
)
from baton.connection import CALL_SECONDS, DEFAULT_ADDRESS
from baton.v1 import cluster_pb2

if TYPE_CHECKING:
    from rich.console import RenderableType

    from baton.cli.views import Overview

_REFRESH_SECONDS = 1.0
_TOP_TIMEOUT_SECONDS = 2.0


def status(
    watch: bool = Option(False, "--watch", help="Refresh once a second."),
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Show the router and its workers."""
    if watch and as_json:
        raise typer.BadParameter("choose one", param_hint="--watch / --json")
    with Client(address) as client:
        if as_json:
            print_json(client.status())
        elif watch:
            refresh(partial(_status, client, _REFRESH_SECONDS), _REFRESH_SECONDS)
        else:
            console().print(_status(client))


def _status(client: Client, timeout: float = CALL_SECONDS) -> RenderableType:
    from baton.cli.views import status_table

    return status_table(client.status(timeout=timeout), client.address)


def top(
    seconds: float = Option(1.0, min=0.2, metavar="SECONDS", help="Time between refreshes."),
    once: bool = Option(False, "--once", help="Print once and exit."),
    model: str = Option("", help="The model's name. (default: the busiest)"),
    as_json: bool = Option(False, "--json", help="Print the data once, and exit."),
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Watch the cluster: pools, bottleneck, the last minutes, the latest requests."""
    with Client(address) as client:
        if as_json:
            print_json(_overview(client, model)._asdict())
        elif once:
            console().print(_overview(client, model).render(address))
        else:
            refresh(lambda: _overview(client, model).render(address), seconds, screen=True)


def _overview(client: Client, model: str) -> Overview:
    from baton.cli.views import Overview

    timeout = _TOP_TIMEOUT_SECONDS
    try:
        recent = client.recent(8, timeout=timeout)
    except PermissionDenied:
        recent = []  # only admins see others' requests
    return Overview(
        client.status(timeout=timeout),
        client.diagnose(model=model, timeout=timeout),
        client.trends(model=model, timeout=timeout),
        recent,
    )


def why(
    request_id: str | None = Argument(
        None, metavar="REQUEST_ID", help="As in x-request-id. (default: list the latest)"
    ),
    limit: int = Option(20, min=1, max=1000, help="Requests to list."),
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Show a request's time breakdown, phase by phase."""
    from baton.cli.views import request_table, waterfall

    with Client(address) as client:
        found = client.recent(limit) if request_id is None else client.timing(request_id)
    if as_json:
        print_json(found)
    elif not isinstance(found, list):
        console().print(waterfall(found))
    elif found:
        console().print(request_table(found))
    else:
        typer.echo("no requests yet")


def diagnose(
    model: str = Option("", help="The model's name. (default: the busiest)"),
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Name the cluster's bottleneck, with evidence and advice."""
    with Client(address) as client:
        diagnosis = client.diagnose(model=model)
    if as_json:
        print_json(diagnosis)
    else:
        print_lines(_diagnosis_lines(diagnosis))


def _diagnosis_lines(diagnosis: cluster_pb2.Diagnosis) -> Iterator[str]:
    yield typer.style(f"{diagnosis.sentence[:1].upper()}{diagnosis.sentence[1:]}.", bold=True)
    yield ""
    yield from (f"  {line}" for line in diagnosis.evidence)
    if diagnosis.advice:
        yield ""
        yield "What to change:"
        yield from (f"  - {line}" for line in diagnosis.advice)

"""`baton drain`: takes a worker out of service without losing what it runs."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from baton import Client
from baton.cli import options
from baton.cli.edge import edge, note
from baton.cli.restart import find, is_last
from baton.cli.terminal import print_json
from baton.cli.waiting import wait_for
from baton.connection import DEFAULT_ADDRESS
from baton.core.errors import InvalidRequest
from baton.v1.cluster_pb2 import StatusResponse


def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="As `baton status` names it.")],
    last: Annotated[
        bool,
        typer.Option("--last", help="Also the only worker of a pool, which nobody then replaces."),
    ] = False,
    wait: Annotated[
        float, typer.Option(help="How long to wait for the worker to be gone, in seconds.")
    ] = 60.0,
    as_json: options.AsJson = False,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Have a worker take nothing new, finish or hand back what runs, and exit."""
    with edge(), Client(address) as client:
        if not last:
            _check_others(worker, client.status())
        client.drain(worker)
        note(f"{worker} takes no new requests")
        wait_for(client.status, partial(_lack, worker), wait)
    if as_json:
        print_json({"worker": worker, "drained": True})
    else:
        typer.echo(f"{worker} is drained")


def _check_others(worker: str, status: StatusResponse) -> None:
    """Raises when nobody would be left of the worker's pool."""
    workers = list(status.workers)
    found = find(workers, worker)
    if found and is_last(workers, found):
        raise InvalidRequest(
            f"{worker} is the only worker of its pool, and would not be replaced: add another one"
            " first, or give --last"
        )


def _lack(worker: str, status: StatusResponse) -> str:
    named = [each for each in status.workers if each.member.worker_id == worker]
    # One that is back has a new process, which is not drained.
    draining = any(each.attached and each.draining for each in named)
    return f"{worker} still finishes what it runs" if draining else ""

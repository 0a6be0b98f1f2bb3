"""`baton drain`: takes a worker out of service without losing what it runs."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from baton import Client, DeadlineExceeded
from baton.connection import DEFAULT_ADDRESS
from cli import options
from cli.edge import edge, note
from cli.terminal import print_json

_POLL_SECONDS = 0.2


def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="As `baton status` names it.")],
    wait: Annotated[
        float, typer.Option(help="How long to wait for the worker to be gone, in seconds.")
    ] = 60.0,
    as_json: options.AsJson = False,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Have a worker take nothing new, finish or hand back what runs, and exit."""
    with edge(), Client(address) as client:
        client.drain(worker)
        note(f"{worker} takes no new requests")
        _wait_gone(client, worker, time.monotonic() + wait)
    if as_json:
        print_json({"worker": worker, "drained": True})
    else:
        typer.echo(f"{worker} is drained")


def _wait_gone(client: Client, worker: str, deadline: float) -> None:
    while _is_attached(client, worker):
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(f"{worker} still finishes what it runs")
        time.sleep(_POLL_SECONDS)


def _is_attached(client: Client, worker: str) -> bool:
    named = [each for each in client.status().workers if each.member.worker_id == worker]
    # One that is back has a new process, which is not drained.
    return any(each.attached and each.draining for each in named)

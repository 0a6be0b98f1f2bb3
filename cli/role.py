"""`baton role`: has a worker change from one phase to the other."""

from __future__ import annotations

from typing import Annotated

import typer

from baton import Client
from baton.cli import options
from baton.cli.edge import edge, note
from baton.cli.terminal import print_json
from baton.connection import DEFAULT_ADDRESS
from baton.core.types import Role


def role(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="As `baton status` names it.")],
    to: Annotated[Role, typer.Argument(metavar="ROLE", help="prefill or decode.")],
    wait: Annotated[
        float, typer.Option(help="How long to wait for the worker to be ready, in seconds.")
    ] = 60.0,
    as_json: options.AsJson = False,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Have a worker finish or hand back what runs, and go on in another role."""
    with edge(), Client(address) as client:
        if not as_json:
            note(f"{worker} is to be a {to.value} worker, once it has drained")
        done = client.switch_role(worker, to, timeout=wait)
    if as_json:
        fields = {
            "worker": worker,
            "role": to.value,
            "drain_seconds": round(done.drain_seconds, 4),
            "switch_seconds": round(done.switch_seconds, 4),
        }
        print_json(fields)
    else:
        typer.echo(
            f"{worker} is a {to.value} worker: drained in {done.drain_seconds:.2f} s,"
            f" ready {done.switch_seconds:.3f} s later"
        )

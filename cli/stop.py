"""`baton stop`: ends a cluster that was started with `baton serve --detach`."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.edge import edge
from baton.cli.terminal import print_json


def stop(
    cluster: Annotated[
        str, typer.Argument(help="As `baton serve` named it. (default: the only one)")
    ] = "",
    ray_address: Annotated[str, typer.Option(help="The Ray that it is on.")] = "auto",
    wait: Annotated[
        float, typer.Option(help="How long answers may take to end, in seconds.")
    ] = 60.0,
    as_json: options.AsJson = False,
) -> None:
    """Stop a detached cluster. Requests under way may end; Ctrl-C ends them at once."""
    with edge():
        from baton.cluster.stopping import stop_detached

        hurry = threading.Event()
        signal.signal(signal.SIGINT, lambda *_: hurry.set())
        # Not on this thread: Ray would take its signals.
        with ThreadPoolExecutor(max_workers=1) as threads:
            stopped = threads.submit(stop_detached, ray_address, cluster, wait, hurry).result()
        if as_json:
            print_json({"cluster": stopped, "stopped": True})
        else:
            typer.echo(f"{stopped} is stopped")

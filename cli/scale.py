"""`baton scale`: more workers, or fewer, while the cluster serves."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from baton import Client
from baton.cli import options
from baton.cli.edge import edge, note
from baton.cli.terminal import print_json
from baton.cli.waiting import wait_for
from baton.connection import DEFAULT_ADDRESS
from baton.core.proto_json import to_json
from baton.v1 import cluster_pb2


def scale(
    prefill: Annotated[
        int | None, typer.Option(min=1, help="Prefill workers. (default: as many as now)")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(min=1, help="Decode workers. (default: as many as now)")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until the pools are as wanted.")] = True,
    timeout: Annotated[float, typer.Option(help="For how long, in seconds.")] = 600.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the pools as a line of JSON at each change.")
    ] = False,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Change how many workers there are. Those that are too many finish what they run."""
    if prefill is None and decode is None:
        raise typer.BadParameter("say how many", param_hint="--prefill / --decode")
    with edge(), Client(address) as client:
        show = _JsonLines() if as_json else _Notes()
        pools = client.scale(prefill, decode)
        show(pools)
        if wait:
            pools = wait_for(partial(_look, client, show), _lack, timeout)
        if not as_json:
            how = "are wanted" if _lack(pools) else "serve"
            typer.echo(f"{pools.prefill} prefill and {pools.decode} decode workers {how}")


class _Notes:
    """A line whenever a worker gets further."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def __call__(self, pools: cluster_pb2.PoolsResponse) -> None:
        for worker in pools.workers:
            words = worker.error or worker.progress
            if self._said.get(worker.worker_id, "ready") != words:
                note(f"{worker.worker_id:<12} {words}")
            self._said[worker.worker_id] = words
        for gone in self._said.keys() - {worker.worker_id for worker in pools.workers}:
            note(f"{gone:<12} gone")
            del self._said[gone]


class _JsonLines:
    def __init__(self) -> None:
        self._said: cluster_pb2.PoolsResponse | None = None

    def __call__(self, pools: cluster_pb2.PoolsResponse) -> None:
        if pools != self._said:
            self._said = pools
            print_json(to_json(pools), in_a_line=True)


def _look(client: Client, show: _Notes | _JsonLines) -> cluster_pb2.PoolsResponse:
    pools = client.pools()
    show(pools)
    return pools


def _lack(pools: cluster_pb2.PoolsResponse) -> str:
    """What there is to wait for; empty when the pools are as wanted."""
    late = [
        f"{worker.worker_id} ({worker.error or worker.progress})"
        for worker in pools.workers
        if not worker.ready
    ]
    return f"the pools are not yet as wanted: {', '.join(late)}" if late else ""

"""`baton scale`, `role`, `plan`, `leave` and `stop`: commands that change a running cluster."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer
from typer import Argument, Option

from baton.cli.terminal import (
    Address,
    AsJson,
    RayAddress,
    Worker,
    connected,
    edge,
    note,
    print_json,
    print_lines,
    print_result,
    wait_for,
)
from baton.connection import DEFAULT_ADDRESS
from baton.core.types import Role
from baton.v1 import cluster_pb2


def scale(
    prefill: int | None = Option(None, min=1, help="Prefill workers. (default: unchanged)"),
    decode: int | None = Option(None, min=1, help="Decode workers. (default: unchanged)"),
    wait: bool = Option(True, help="Wait until the pools are as wanted."),
    timeout: float = Option(600.0, help="Seconds to wait."),
    as_json: bool = Option(
        False, "--json", help="Print the pools as a line of JSON at each change."
    ),
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Change the number of workers. Surplus workers finish their requests first."""
    if prefill is None and decode is None:
        raise typer.BadParameter("give a number of workers", param_hint="--prefill / --decode")
    show = _JsonLines() if as_json else _Notes()
    with connected(address) as client:
        pools = show(client.scale(prefill, decode))
        if wait:
            pools = wait_for(lambda: show(client.pools()), _lack, timeout)
    if not as_json:
        how = "are wanted" if _lack(pools) else "serve"
        typer.echo(f"{pools.prefill} prefill and {pools.decode} decode workers {how}")


class _Notes:
    """Prints a line at each progress of a worker."""

    def __init__(self) -> None:
        self._noted: dict[str, str] = {}

    def __call__(self, pools: cluster_pb2.PoolsResponse) -> cluster_pb2.PoolsResponse:
        for worker in pools.workers:
            progress = worker.error or worker.progress
            if self._noted.get(worker.worker_id, "ready") != progress:
                note(f"{worker.worker_id:<12} {progress}")
            self._noted[worker.worker_id] = progress
        for gone in self._noted.keys() - {worker.worker_id for worker in pools.workers}:
            note(f"{gone:<12} gone")
            del self._noted[gone]
        return pools


class _JsonLines:
    """Prints the pools at each change."""

    def __init__(self) -> None:
        self._printed: cluster_pb2.PoolsResponse | None = None

    def __call__(self, pools: cluster_pb2.PoolsResponse) -> cluster_pb2.PoolsResponse:
        if pools != self._printed:
            self._printed = pools
            print_json(pools, in_a_line=True)
        return pools


def _lack(pools: cluster_pb2.PoolsResponse) -> str:
    late = [
        f"{worker.worker_id} ({worker.error or worker.progress})"
        for worker in pools.workers
        if not worker.ready
    ]
    return f"the pools are not yet as wanted: {', '.join(late)}" if late else ""


def role(
    worker: Worker,
    to: Annotated[Role, typer.Argument(metavar="ROLE", help="prefill or decode.")],
    wait: float = Option(60.0, help="Seconds to wait for the worker to be ready."),
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Make a worker finish or migrate its requests, and continue in another role."""
    with connected(address) as client:
        if not as_json:
            note(f"{worker} becomes a {to.value} worker once it has drained")
        done = client.switch_role(worker, to, timeout=wait)
    fields = {
        "worker": worker,
        "role": to.value,
        "drain_seconds": round(done.drain_seconds, 4),
        "switch_seconds": round(done.switch_seconds, 4),
    }
    text = (
        f"{worker} is a {to.value} worker: drained in {done.drain_seconds:.2f} s,"
        f" ready {done.switch_seconds:.3f} s later"
    )
    print_result(fields, text, as_json)


def plan(
    limit: int = Option(10, min=1, help="Changes to show."),
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Show the planner's latest decisions, with reasons."""
    with connected(address) as client:
        planned = client.plan()
        if as_json:
            print_json(planned)
            return
        late = [worker for worker in client.pools().workers if not worker.ready]
    print_lines(_plan_lines(planned, late, limit, time.time()))


def _plan_lines(
    planned: cluster_pb2.PlanResponse,
    late: list[cluster_pb2.PooledWorker],
    limit: int,
    now: float,
) -> Iterator[str]:
    """`late` are the workers that do not serve yet, or not any more."""
    if not planned.enabled:
        yield "no planner runs here; `baton serve --plan` starts one"
        return
    acts = "changes the pools" if planned.acts else "only reports what it would do"
    yield (
        f"the planner {acts}: first token within {planned.ttft:g} s, {1e3 * planned.itl:g} ms"
        f" between two, at least {planned.least_prefill} + {planned.least_decode} workers, at"
        f" most {planned.most_workers}"
    )
    if planned.HasField("last"):
        yield from _round_lines(planned.last, "now")
    for worker in late:
        yield f"            {worker.worker_id}: {worker.error or worker.progress}"
    for change in planned.changes[:limit]:
        yield from _round_lines(change, f"{max(0.0, now - change.at):,.0f} s ago")


def _round_lines(made: cluster_pb2.PlannedRound, when: str) -> Iterator[str]:
    have = f"{made.have_prefill} + {made.have_decode} workers"
    yield typer.style(f"{when:>10}  {made.summary}", bold=True) + f"  ({have})"
    yield from (f"            {reason}" for reason in made.reasons)


def leave(
    ray_address: RayAddress = "auto",
    host: str = Option("", help="The machine's address in Ray. (default: this one's)"),
    wait: float = Option(60.0, help="Seconds to wait for its workers to leave."),
    as_json: AsJson = False,
) -> None:
    """Make the workers of a machine finish or migrate their requests, and start elsewhere."""
    with edge():
        from baton.cluster.stopping import leave_node

        left = leave_node(ray_address, host, wait)
    if as_json:
        print_json({"workers": left, "left": True})
    else:
        print_lines(f"{name} has left" for name in left)


def stop(
    cluster: str = Argument("", help="As `baton serve` named it. (default: the only one)"),
    ray_address: RayAddress = "auto",
    wait: float = Option(60.0, help="Seconds that answers may take to end."),
    as_json: AsJson = False,
) -> None:
    """Stop a detached cluster. Running requests may end; Ctrl-C ends them at once."""
    with edge():
        from baton.cluster.stopping import stop_detached

        hurry = threading.Event()
        signal.signal(signal.SIGINT, lambda *_: hurry.set())
        # Not on this thread: Ray would take its signals.
        with ThreadPoolExecutor(max_workers=1) as threads:
            stopped = threads.submit(stop_detached, ray_address, cluster, wait, hurry).result()
    print_result({"cluster": stopped, "stopped": True}, f"{stopped} is stopped", as_json)

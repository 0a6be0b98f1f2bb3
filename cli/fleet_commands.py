"""`baton scale`, `role`, `plan`, `drain`, `restart`, `leave` and `stop`: change a running cluster.

`restart` replaces the processes of workers one by one, under load. Each worker accepts nothing new,
finishes or migrates its requests, and exits; Ray starts it again, and the next one follows when it
is usable. Prefill and decode alternate, so that an upgrade has a pair of the new version from the
second worker on.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, zip_longest
from typing import Annotated

import typer
from typer import Argument, Option

from baton import Client, InvalidRequest, Unavailable
from baton.cli.terminal import (
    Address,
    AsJson,
    ModelName,
    RayAddress,
    Worker,
    note,
    print_json,
    print_lines,
    print_result,
    wait_for,
)
from baton.connection import DEFAULT_ADDRESS
from baton.core.errors import NotServed, UnknownModel
from baton.core.types import Role
from baton.v1 import cluster_pb2
from baton.v1.cluster_pb2 import StatusResponse, WorkerStatus
from baton.v1.worker_pb2 import ROLE_DECODE, ROLE_PREFILL


def scale(
    prefill: int | None = Option(None, min=1, help="Prefill workers. (default: unchanged)"),
    decode: int | None = Option(None, min=1, help="Decode workers. (default: unchanged)"),
    model: ModelName = "",
    wait: bool = Option(True, help="Wait until the pools have these sizes."),
    timeout: float = Option(600.0, help="Seconds to wait."),
    as_json: bool = Option(
        False, "--json", help="Print the pools as a line of JSON at each change."
    ),
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Change the number of workers. Surplus workers finish their requests first."""
    if prefill is None and decode is None:
        raise typer.BadParameter("give a number of workers", param_hint="--prefill / --decode")
    show = PoolChanges(as_json)
    with Client(address) as client:
        pools = show(client.scale(prefill, decode, model=model))
        name = model or pools.models[0].model

        def missing(pools: cluster_pb2.PoolsResponse) -> str:
            own = pools_of(name, pools)
            if prefill not in (None, own.prefill) or decode not in (None, own.decode):
                raise Unavailable(f"another change came after this one: {_sizes(own)} are wanted")
            return missing_workers(pools.workers)

        if wait:
            pools = wait_for(lambda: show(client.pools()), missing, timeout)
    if not as_json:
        how = "are wanted" if missing_workers(pools.workers) else "serve"
        typer.echo(f"{_sizes(pools_of(name, pools))} {how}")


class PoolChanges:
    """Prints what changes in the pools: a line for each worker, or everything as JSON."""

    def __init__(self, as_json: bool = False, *, quiet: bool = False) -> None:
        self._as_json = as_json
        self._quiet = quiet
        self._seen: cluster_pb2.PoolsResponse | None = None

    def __call__(self, pools: cluster_pb2.PoolsResponse) -> cluster_pb2.PoolsResponse:
        before, self._seen = self._seen, pools
        if self._quiet:
            return pools
        if not self._as_json:
            self._note(_progress(before) if before else {}, _progress(pools))
        elif pools != before:
            print_json(pools, in_a_line=True)
        return pools

    def _note(self, before: dict[str, str], now: dict[str, str]) -> None:
        for name, progress in now.items():
            if before.get(name, "ready") != progress:
                note(f"{name:<12} {progress}")
        for gone in before.keys() - now.keys():
            note(f"{gone:<12} gone")


def _progress(pools: cluster_pb2.PoolsResponse) -> dict[str, str]:
    return {worker.worker_id: worker.error or worker.progress for worker in pools.workers}


def pools_of(model: str, pools: cluster_pb2.PoolsResponse) -> cluster_pb2.ModelPools:
    """The pools of a model. Raises UnknownModel if it was removed."""
    for own in pools.models:
        if own.model == model and not own.removed:
            return own
    raise UnknownModel(f"{model} was removed meanwhile")


def _sizes(pools: cluster_pb2.ModelPools) -> str:
    return f"{pools.prefill} prefill and {pools.decode} decode workers"


def missing_workers(workers: Iterable[cluster_pb2.PooledWorker]) -> str:
    late = [
        f"{worker.worker_id} ({worker.error or worker.progress})"
        for worker in workers
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
    with Client(address) as client:
        if not as_json:
            note(f"asking {worker} to drain and to become a {to.value} worker")
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
    model: ModelName = "",
    limit: int = Option(10, min=1, help="Changes to show."),
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Show the planner's latest decisions, with reasons."""
    with Client(address) as client:
        planned = client.plan(model=model)
        if as_json:
            print_json(planned)
            return
        workers = client.pools().workers
        late = [each for each in workers if not each.ready and model in ("", each.model)]
    print_lines(_plan_lines(planned, late, limit, time.time()))


def _plan_lines(
    planned: cluster_pb2.PlanResponse,
    late: list[cluster_pb2.PooledWorker],
    limit: int,
    now: float,
) -> Iterator[str]:
    """`late` are the workers that do not serve yet, or are leaving."""
    if not planned.enabled:
        yield "no planner runs here; `baton serve --plan` starts one"
        return
    acts = "changes the pools" if planned.acts else "only reports what it would do"
    yield (
        f"the planner {acts}: first token within {planned.ttft:g} s, {1e3 * planned.itl:g} ms"
        f" between tokens, at least {planned.least_prefill} + {planned.least_decode} workers, at"
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
    from baton.cluster.stopping import leave_node

    left = leave_node(ray_address, host, wait)
    if as_json:
        print_json({"workers": left, "left": True})
    else:
        print_lines(f"{name} has left" for name in left)


def stop(
    cluster: str = Argument("", help="Its name in `baton serve`. (default: the only one)"),
    ray_address: RayAddress = "auto",
    wait: float = Option(60.0, help="Seconds that answers may take to end."),
    yes: bool = Option(False, "--yes", help="Do not ask."),
    as_json: AsJson = False,
) -> None:
    """Stop a detached cluster. Running requests may end; Ctrl-C ends them at once.

    Asks first in a terminal, unless the cluster is named.
    """
    from baton.cluster.stopping import find_detached, stop_detached

    stop_now = threading.Event()
    # Not on this thread: Ray would take its signals.
    with ThreadPoolExecutor(max_workers=1) as threads:
        address, found = threads.submit(find_detached, ray_address, cluster).result()
        if not (yes or cluster) and sys.stdin.isatty():
            typer.confirm(f"Stop {found} on the Ray at {address}?", abort=True, err=True)
        signal.signal(signal.SIGINT, lambda *_: stop_now.set())
        running = threads.submit(stop_detached, address, found, wait, stop_now)
        while not running.done():  # a signal that another thread gets does not wake this one
            futures.wait([running], timeout=1.0)
        running.result()
    print_result({"cluster": found, "stopped": True}, f"{found} is stopped", as_json)


def drain(
    worker: Worker,
    last: bool = Option(
        False, "--last", help="Drain even the only worker of a pool. It is not replaced."
    ),
    wait: float = Option(60.0, help="Seconds to wait for the worker to exit."),
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Make a worker accept nothing new, finish or migrate its requests, and exit."""

    def missing(status: StatusResponse) -> str:
        # A worker that is back has a new process, which is not draining.
        found = _find(status.workers, worker)
        return f"{worker} still finishes its requests" if found and found.draining else ""

    with Client(address) as client:
        workers = list(client.status().workers)
        found = _find(workers, worker)
        if not last and found and _is_last(workers, found):
            raise InvalidRequest(
                f"{worker} is the only worker of its pool, and would not be replaced: add another"
                " one first, or give --last"
            )
        client.drain(worker)
        note(f"{worker} accepts no new requests")
        wait_for(client.status, missing, wait)
    print_result({"worker": worker, "drained": True}, f"{worker} is drained", as_json)


def restart(
    workers: list[str] | None = Argument(
        None, metavar="[WORKER]...", help="Names from `baton status`. (default: all)"
    ),
    last: bool = Option(
        False, "--last", help="Restart even the only worker of a pool. Requests wait for it."
    ),
    wait: float = Option(600.0, help="Seconds to wait for each worker."),
    as_json: bool = Option(False, "--json", help="Print a line of JSON for each worker."),
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Restart workers one by one. No request is lost."""
    with Client(address) as client:
        for name in workers or _alternating(client.status().workers):
            began = time.monotonic()
            _restart(client, name, last, wait)
            seconds = time.monotonic() - began
            if as_json:
                print_json({"worker": name, "seconds": round(seconds, 3)}, in_a_line=True)
            else:
                typer.echo(f"{name} is back after {seconds:.1f} s")


def _alternating(workers: Iterable[WorkerStatus]) -> list[str]:
    """The names of all attached workers, prefill and decode in turn."""
    named: dict[int, list[str]] = {ROLE_PREFILL: [], ROLE_DECODE: []}
    for worker in workers:
        if worker.attached:
            named[worker.member.role].append(worker.member.worker_id)
    turns = zip_longest(*(sorted(names) for names in named.values()))
    return [name for name in chain.from_iterable(turns) if name is not None]


def _restart(client: Client, name: str, last: bool, seconds: float) -> None:
    workers = list(client.status().workers)
    before = _find(workers, name)
    if before is None:
        raise InvalidRequest(f"no worker called {name!r} is attached", field="worker_id")
    if not last and _is_last(workers, before):
        raise InvalidRequest(
            f"{name} is the only worker of its pool: add another one first, or give --last to"
            " have requests wait for it, up to router.placement_timeout"
        )
    client.drain(name, restart=True)
    note(f"{name} accepts no new requests")
    incarnation = before.incarnation

    def missing(status: StatusResponse) -> str:
        if is_back(list(status.workers), name, incarnation):
            return ""
        if error := _start_error(client, name):
            raise Unavailable(
                f"{name} cannot start again; the workers after it were not restarted: {error}"
            )
        return f"{name} is not back yet"

    wait_for(client.status, missing, seconds)


def _start_error(client: Client, name: str) -> str:
    """Why a worker cannot start; empty if it can, or if no controller knows."""
    try:
        workers = client.pools().workers
    except (NotServed, Unavailable):
        return ""
    return next((worker.error for worker in workers if worker.worker_id == name), "")


def is_back(workers: list[WorkerStatus], name: str, before: int) -> bool:
    """True if a worker is usable again, in another process than `before`."""
    worker = _find(workers, name)
    if worker is None or worker.incarnation == before or not _is_usable(worker):
        return False
    # It must be connected to a worker that it fits. The first of a new version fits none.
    model = worker.member.model
    workers = [other for other in workers if other.member.model == model]
    others = [other for other in workers if other.member.role != worker.member.role]
    usable = {other.member.worker_id for other in others if _is_usable(other)}
    fitting = usable - {misfit.worker_id for misfit in worker.misfits}
    if worker.member.role == ROLE_PREFILL:
        partners = set(worker.connected)
    else:
        partners = {other.member.worker_id for other in others if name in other.connected}
    return not fitting or not fitting.isdisjoint(partners)


def _is_last(workers: Iterable[WorkerStatus], worker: WorkerStatus) -> bool:
    """True if no other worker of the same role and model is usable."""
    return not any(
        other.member.role == worker.member.role
        and other.member.model == worker.member.model
        and other.member.worker_id != worker.member.worker_id
        and _is_usable(other)
        for other in workers
    )


def _is_usable(worker: WorkerStatus) -> bool:
    load = worker.load
    reported = load.free_pages or load.leased_pages or load.quarantined_pages
    # A worker that fits no other has a fault too, but is healthy.
    healthy = not worker.fault or bool(worker.misfits)
    return worker.attached and bool(reported) and healthy and not worker.draining


def _find(workers: Iterable[WorkerStatus], name: str) -> WorkerStatus | None:
    """The attached worker of that name."""
    attached = (worker for worker in workers if worker.attached)
    return next((worker for worker in attached if worker.member.worker_id == name), None)

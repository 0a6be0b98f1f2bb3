"""`baton restart`: fresh processes for all workers, one after the other, under load.

Each worker takes nothing new, finishes or hands back what runs, and exits; Ray starts it again,
and the next one's turn comes when it is usable. Prefill and decode take turns, so that in a
change from one version to another there is, from the second worker on, a pair of each.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain, zip_longest
from typing import Annotated

import typer

from baton import Client
from baton.cli import options
from baton.cli.edge import edge, note
from baton.cli.terminal import print_json
from baton.cli.waiting import wait_for
from baton.connection import DEFAULT_ADDRESS
from baton.core.errors import InvalidRequest, NotServed, Unavailable
from baton.v1.cluster_pb2 import StatusResponse, WorkerStatus
from baton.v1.worker_pb2 import ROLE_DECODE, ROLE_PREFILL


def restart(
    workers: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORKER]...", help="As `baton status` names them; all by default."),
    ] = None,
    last: Annotated[
        bool,
        typer.Option("--last", help="Also the only worker of a pool: requests wait for it."),
    ] = False,
    wait: Annotated[
        float, typer.Option(help="How long to wait for a worker to be back, in seconds.")
    ] = 600.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each worker.")
    ] = False,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Restart workers, one after the other, without losing what runs."""
    with edge(), Client(address) as client:
        for name in workers or in_turns(client.status().workers):
            began = time.monotonic()
            _restart(client, name, last, wait)
            _tell(name, time.monotonic() - began, as_json)


def _tell(name: str, seconds: float, as_json: bool) -> None:
    if as_json:
        print_json({"worker": name, "seconds": round(seconds, 3)}, in_a_line=True)
    else:
        typer.echo(f"{name} is back after {seconds:.1f} s")


def in_turns(workers: Iterable[WorkerStatus]) -> list[str]:
    """The names of all attached workers, a prefill and a decode worker by turns."""
    named: dict[int, list[str]] = {ROLE_PREFILL: [], ROLE_DECODE: []}
    for worker in workers:
        if worker.attached:
            named[worker.member.role].append(worker.member.worker_id)
    turns = zip_longest(*(sorted(names) for names in named.values()))
    return [name for name in chain.from_iterable(turns) if name is not None]


def _restart(client: Client, name: str, last: bool, seconds: float) -> None:
    workers = list(client.status().workers)
    before = find(workers, name)
    if before is None:
        raise InvalidRequest(f"no worker called {name!r} is attached", field="worker_id")
    if not last and is_last(workers, before):
        raise InvalidRequest(
            f"{name} is the only worker of its pool: add another one first, or give --last to"
            " have requests wait for it, as long as router.placement_timeout says"
        )
    client.drain(name, restart=True)
    note(f"{name} takes no new requests")
    incarnation = before.incarnation

    def lack(status: StatusResponse) -> str:
        if is_back(list(status.workers), name, incarnation):
            return ""
        if error := _why_not(client, name):
            raise Unavailable(
                f"{name} cannot start again; those after it were not touched: {error}"
            )
        return f"{name} is not back yet"

    wait_for(client.status, lack, seconds)


def _why_not(client: Client, name: str) -> str:
    """Why a worker cannot start, if a controller is there to tell and it cannot."""
    try:
        workers = client.pools().workers
    except (NotServed, Unavailable):
        return ""
    return next((worker.error for worker in workers if worker.worker_id == name), "")


def is_last(workers: Iterable[WorkerStatus], worker: WorkerStatus) -> bool:
    """Whether no other worker of the same role could do its work."""
    return not any(
        other.member.role == worker.member.role
        and other.member.worker_id != worker.member.worker_id
        and _is_usable(other)
        for other in workers
    )


def is_back(workers: list[WorkerStatus], name: str, before: int) -> bool:
    """Whether a worker is used again, as another process than `before`."""
    worker = find(workers, name)
    if worker is None or worker.incarnation == before or not _is_usable(worker):
        return False
    # It can exchange pages with whom it fits; one of another version than all fits none yet.
    others = [other for other in workers if other.member.role != worker.member.role]
    usable = {other.member.worker_id for other in others if _is_usable(other)}
    fitting = usable - {misfit.worker_id for misfit in worker.misfits}
    return not fitting or not fitting.isdisjoint(_partners(worker, others))


def _partners(worker: WorkerStatus, others: Iterable[WorkerStatus]) -> set[str]:
    """The workers of the other role that pages pass to or from."""
    if worker.member.role == ROLE_PREFILL:
        return set(worker.connected)
    name = worker.member.worker_id
    return {other.member.worker_id for other in others if name in other.connected}


def _is_usable(worker: WorkerStatus) -> bool:
    load = worker.load
    reported = load.free_pages or load.leased_pages or load.quarantined_pages
    # One that fits nobody has a fault too, and is sound.
    sound = not worker.fault or bool(worker.misfits)
    return worker.attached and bool(reported) and sound and not worker.draining


def find(workers: Iterable[WorkerStatus], name: str) -> WorkerStatus | None:
    """The attached worker of that name."""
    named = (worker for worker in workers if worker.member.worker_id == name)
    return next((worker for worker in named if worker.attached), None)

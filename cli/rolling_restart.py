"""`baton drain`, and `baton restart`: new processes for all workers, one by one, under load.

Each worker accepts nothing new, finishes or migrates its requests, and exits; Ray starts it
again, and the next one follows when it is usable. Prefill and decode alternate, so that in a
change of version there is a pair of the new one from the second worker on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain, zip_longest

import typer
from typer import Argument, Option

from baton import Client, InvalidRequest, Unavailable
from baton.cli.terminal import (
    Address,
    AsJson,
    Worker,
    connected,
    note,
    print_json,
    print_result,
    wait_for,
)
from baton.connection import DEFAULT_ADDRESS
from baton.core.errors import NotServed
from baton.v1.cluster_pb2 import StatusResponse, WorkerStatus
from baton.v1.worker_pb2 import ROLE_DECODE, ROLE_PREFILL


def drain(
    worker: Worker,
    last: bool = Option(
        False, "--last", help="Also the only worker of a pool. It is not replaced."
    ),
    wait: float = Option(60.0, help="Seconds to wait for the worker to exit."),
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Make a worker accept nothing new, finish or migrate its requests, and exit."""

    def lack(status: StatusResponse) -> str:
        # A worker that is back has a new process, which is not draining.
        draining = (each.attached and each.draining for each in status.workers if _is(each, worker))
        return f"{worker} still finishes its requests" if any(draining) else ""

    with connected(address) as client:
        workers = list(client.status().workers)
        found = _find(workers, worker)
        if not last and found and _is_last(workers, found):
            raise InvalidRequest(
                f"{worker} is the only worker of its pool, and would not be replaced: add another"
                " one first, or give --last"
            )
        client.drain(worker)
        note(f"{worker} accepts no new requests")
        wait_for(client.status, lack, wait)
    print_result({"worker": worker, "drained": True}, f"{worker} is drained", as_json)


def restart(
    workers: list[str] | None = Argument(
        None, metavar="[WORKER]...", help="As `baton status` names them; all by default."
    ),
    last: bool = Option(
        False, "--last", help="Also the only worker of a pool. Requests wait for it."
    ),
    wait: float = Option(600.0, help="Seconds to wait for each worker."),
    as_json: bool = Option(False, "--json", help="Print a line of JSON for each worker."),
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Restart workers one by one. No request is lost."""
    with connected(address) as client:
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

    def lack(status: StatusResponse) -> str:
        if is_back(list(status.workers), name, incarnation):
            return ""
        if error := _start_error(client, name):
            raise Unavailable(
                f"{name} cannot start again; those after it were not touched: {error}"
            )
        return f"{name} is not back yet"

    wait_for(client.status, lack, seconds)


def _start_error(client: Client, name: str) -> str:
    """Why a worker cannot start; empty if it can, or if no controller knows."""
    try:
        workers = client.pools().workers
    except (NotServed, Unavailable):
        return ""
    return next((worker.error for worker in workers if worker.worker_id == name), "")


def is_back(workers: list[WorkerStatus], name: str, before: int) -> bool:
    """Whether a worker is usable again, as another process than `before`."""
    worker = _find(workers, name)
    if worker is None or worker.incarnation == before or not _is_usable(worker):
        return False
    # It must exchange pages with a worker that it fits. The first of a new version fits none.
    others = [other for other in workers if other.member.role != worker.member.role]
    usable = {other.member.worker_id for other in others if _is_usable(other)}
    fitting = usable - {misfit.worker_id for misfit in worker.misfits}
    if worker.member.role == ROLE_PREFILL:
        partners = set(worker.connected)
    else:
        partners = {other.member.worker_id for other in others if name in other.connected}
    return not fitting or not fitting.isdisjoint(partners)


def _is(worker: WorkerStatus, name: str) -> bool:
    return worker.member.worker_id == name


def _is_last(workers: Iterable[WorkerStatus], worker: WorkerStatus) -> bool:
    """Whether no other worker of the same role is usable."""
    return not any(
        other.member.role == worker.member.role
        and not _is(other, worker.member.worker_id)
        and _is_usable(other)
        for other in workers
    )


def _is_usable(worker: WorkerStatus) -> bool:
    load = worker.load
    reported = load.free_pages or load.leased_pages or load.quarantined_pages
    # A worker that fits none has a fault too, but is sound.
    sound = not worker.fault or bool(worker.misfits)
    return worker.attached and bool(reported) and sound and not worker.draining


def _find(workers: Iterable[WorkerStatus], name: str) -> WorkerStatus | None:
    """The attached worker of that name."""
    return next((worker for worker in workers if _is(worker, name) and worker.attached), None)

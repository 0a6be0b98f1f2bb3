"""Draws a router's status as a table."""

from __future__ import annotations

from itertools import accumulate, pairwise

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.v1 import cluster_pb2, worker_pb2

BAR_WIDTH = 16

# Each kind of page has a colour and, for where there are none, a shade.
_LEASED = ("█", "green")
_QUARANTINED = ("▓", "red")
_CACHED = ("▒", "blue")
_FREE = ("░", "dim")

_ROLES = {worker_pb2.ROLE_PREFILL: "prefill", worker_pb2.ROLE_DECODE: "decode"}


def render(status: cluster_pb2.StatusResponse, address: str) -> RenderableType:
    """One line about the router, and one row a worker."""
    return Group(_router_line(status, address), _worker_table(status))


def _router_line(status: cluster_pb2.StatusResponse, address: str) -> Text:
    return Text.assemble(
        (status.model, "bold"),
        f"  router {status.router_id} at {address}, up {duration(status.uptime_seconds)},"
        f" {status.active_requests} active, {status.finished_requests} finished",
    )


def _worker_table(status: cluster_pb2.StatusResponse) -> Table:
    table = Table(box=box.SIMPLE_HEAD, caption=_legend(), caption_justify="left", pad_edge=False)
    for name in ("worker", "role", "address", "attached", "pages"):
        table.add_column(name, no_wrap=True)
    for name in ("free", "leased", "quarantined", "cached", "total", "waiting", "running"):
        table.add_column(name, justify="right")
    table.add_column("active", justify="right")
    table.add_column("fault", style="red", overflow="fold")
    for worker in status.workers:
        table.add_row(*_cells(worker))
    return table


def _cells(worker: cluster_pb2.WorkerStatus) -> list[RenderableType]:
    load = worker.load
    numbers = [
        load.free_pages,
        load.leased_pages,
        load.quarantined_pages,
        load.cached_pages,
        worker.total_pages,
        load.waiting,
        load.running,
        worker.active_requests,
    ]
    return [
        worker.member.worker_id,
        _ROLES.get(worker.member.role, "?"),
        worker.member.address,
        Text("yes", style="green") if worker.attached else Text("no", style="red"),
        page_bar(load),
        *(str(number) for number in numbers),
        worker.fault or load.fault,
    ]


def page_bar(load: worker_pb2.Load) -> Text:
    """A pool as a bar: leased, quarantined, cached, free. Empty before the first report."""
    counts = [load.leased_pages, load.quarantined_pages, load.cached_pages, load.free_pages]
    total = sum(counts)
    if total == 0:
        return Text()
    # Rounding the boundaries, not the lengths, keeps every bar equally long.
    ends = [round(BAR_WIDTH * count / total) for count in accumulate(counts, initial=0)]
    kinds = (_LEASED, _QUARANTINED, _CACHED, _FREE)
    return Text.assemble(
        *(
            (shade * (end - start), colour)
            for (shade, colour), (start, end) in zip(kinds, pairwise(ends), strict=True)
        )
    )


def _legend() -> Text:
    names = ("leased", "quarantined", "cached", "free")
    kinds = (_LEASED, _QUARANTINED, _CACHED, _FREE)
    return Text("  ").join(
        Text.assemble(kind, f" {name}") for kind, name in zip(kinds, names, strict=True)
    )


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min, 5 h 12 min, 2 d 3 h."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes == 0:
        return f"{seconds:.0f} s"
    if hours == 0:
        return f"{minutes} min"
    if days == 0:
        return f"{hours} h {minutes % 60} min"
    return f"{days} d {hours % 24} h"

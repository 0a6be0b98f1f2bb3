"""Draws what `baton status` and `baton top` show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.cli import waterfall
from baton.v1 import cluster_pb2, timing_pb2, worker_pb2

BAR_WIDTH = 16
CHART_POINTS = 60

_BLOCKS = " ▁▂▃▄▅▆▇█"
_BOUND_COLOURS = {
    cluster_pb2.BOUND_IDLE: "green",
    cluster_pb2.BOUND_NONE: "green",
    cluster_pb2.BOUND_WORKERS: "red",
}

# The kinds of pages, in a bar's order: a colour and, for terminals without, a shade.
_KINDS = (
    ("leased", "█", "green"),
    ("quarantined", "▓", "red"),
    ("cached", "▒", "blue"),
    ("free", "░", "dim"),
)

_ROLES = {worker_pb2.ROLE_PREFILL: "prefill", worker_pb2.ROLE_DECODE: "decode"}


def status_table(status: cluster_pb2.StatusResponse, address: str) -> RenderableType:
    """A line for the router, a row for each worker, then faults. Fits 80 columns."""
    return Group(
        _router_line(status, address),
        "",
        _worker_table(status),
        "",
        _legend(),
        *_faults(status),
        *_misfits(status),
    )


def _router_line(status: cluster_pb2.StatusResponse, address: str) -> Text:
    return Text.assemble(
        (status.model, "bold"),
        f" by {status.router_id} at {address}, up {duration(status.uptime_seconds)},"
        f" {status.active_requests} active, {status.queued_requests} queued,"
        f" {status.finished_requests} finished",
        (" (draining)" if status.draining else "", "yellow"),
    )


def _worker_table(status: cluster_pb2.StatusResponse) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("worker", "role", "attached", "pages"):
        table.add_column(name, overflow="fold")
    for name in ("waiting", "running", "active", "hits"):
        table.add_column(name, justify="right")
    for worker in status.workers:
        table.add_row(*_cells(worker))
    return table


def _cells(worker: cluster_pb2.WorkerStatus) -> list[RenderableType]:
    return [
        _name(worker.member),
        _ROLES.get(worker.member.role, "?"),
        _attached(worker),
        _pages(worker),
        str(worker.load.waiting),
        str(worker.load.running),
        str(worker.active_requests),
        _hits(worker),
    ]


def _name(member: cluster_pb2.Member) -> Text:
    """With its address, which only admins get."""
    address = f"\n{member.address}" if member.address else ""
    return Text.assemble(member.worker_id, (address, "dim"))


def _attached(worker: cluster_pb2.WorkerStatus) -> Text:
    if worker.attached and worker.draining:
        return Text("draining", style="yellow")
    return Text("yes", style="green") if worker.attached else Text("no", style="red")


def _hits(worker: cluster_pb2.WorkerStatus) -> str:
    """The cached share of the prompt tokens that it was to prefill or to receive."""
    if not worker.prompt_tokens:
        return "-"
    return f"{worker.cached_tokens / worker.prompt_tokens:.0%}"


def _pages(worker: cluster_pb2.WorkerStatus) -> Text:
    """A bar, and its numbers below."""
    numbers = "+".join(str(count) for count in _counts(worker.load))
    kept = f"\n{worker.load.kept_pages} in second tier" if worker.load.kept_pages else ""
    return Text.assemble(page_bar(worker.load), f"\n{numbers} of {worker.total_pages}", kept)


def page_bar(load: worker_pb2.Load) -> Text:
    """Blank before the worker's first report."""
    counts = _counts(load)
    total = sum(counts)
    if total == 0:
        return Text(" " * BAR_WIDTH)
    # Rounding the boundaries, not the lengths, keeps every bar equally long.
    ends = [round(BAR_WIDTH * count / total) for count in accumulate(counts, initial=0)]
    return Text.assemble(
        *(
            (shade * (end - start), colour)
            for (_, shade, colour), (start, end) in zip(_KINDS, pairwise(ends), strict=True)
        )
    )


def _counts(load: worker_pb2.Load) -> list[int]:
    empty = load.free_pages - load.cached_pages
    return [load.leased_pages, load.quarantined_pages, load.cached_pages, empty]


def _legend() -> Text:
    return Text(" + ").join(
        Text.assemble((shade, colour), f" {name}") for name, shade, colour in _KINDS
    )


def _faults(status: cluster_pb2.StatusResponse) -> list[Text]:
    faults = ((w.member.worker_id, w.fault or w.load.fault) for w in status.workers)
    return [Text(f"{name}: {fault}", style="red") for name, fault in faults if fault]


def _misfits(status: cluster_pb2.StatusResponse) -> list[Text]:
    """Each pair of different versions or layouts once."""
    return [
        Text(f"{worker.member.worker_id} and {misfit.worker_id}: {misfit.reason}", style="yellow")
        for worker in status.workers
        for misfit in worker.misfits
        if worker.member.role == worker_pb2.ROLE_PREFILL
    ]


def duration(seconds: float) -> str:
    """As in 42 s, 3 min, 5 h 12 min, 2 d 3 h."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes == 0:
        return f"{int(seconds)} s"
    if hours == 0:
        return f"{minutes} min"
    if days == 0:
        return f"{hours} h {minutes % 60} min"
    return f"{days} d {hours % 24} h"


@dataclass(frozen=True, slots=True)
class Overview:
    """What `baton top` shows."""

    address: str
    status: cluster_pb2.StatusResponse
    diagnosis: cluster_pb2.Diagnosis
    trends: cluster_pb2.TrendsResponse
    recent: Sequence[timing_pb2.RequestTiming]

    def render(self) -> RenderableType:
        parts: list[RenderableType] = [
            status_table(self.status, self.address),
            "",
            *self._diagnosis(),
            "",
            self._charts(),
        ]
        if self.recent:
            parts += ["", waterfall.request_table(self.recent)]
        return Group(*parts)

    def fields(self) -> dict[str, object]:
        """The same for scripts."""
        return {item.name: getattr(self, item.name) for item in fields(self)[1:]}

    def _diagnosis(self) -> list[Text]:
        colour = _BOUND_COLOURS.get(self.diagnosis.bound, "yellow")
        advice = [Text(f"  {line}", style="dim") for line in self.diagnosis.advice[:2]]
        return [Text(self.diagnosis.sentence, style=colour), *advice]

    def _charts(self) -> Table:
        points = self.trends.points[-CHART_POINTS:]
        each = self.trends.seconds_each or 1.0
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        rows: list[tuple[str, list[float], Callable[[float], str]]] = [
            ("TTFT p50", [point.ttft.p50 for point in points], waterfall.time_text),
            ("ITL p50", [point.itl.p50 for point in points], waterfall.time_text),
            ("tokens/s", [point.output_tokens / each for point in points], "{:,.1f}".format),
        ]
        for name, values, text in rows:
            most = max(values, default=0.0)
            latest = next((value for value in reversed(values) if value), 0.0)
            table.add_row(name, Text(sparkline(values), "blue"), text(latest), f"max {text(most)}")
        return table


def sparkline(values: Sequence[float]) -> str:
    """One character a value; blank for 0."""
    most = max(values, default=0.0)
    steps = len(_BLOCKS) - 1
    heights = (max(1, round(steps * value / most)) if value else 0 for value in values)
    return "".join(_BLOCKS[height] for height in heights)

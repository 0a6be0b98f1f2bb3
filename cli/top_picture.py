"""What `baton top` shows, from what a router tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.cli import status_table, waterfall
from baton.core.proto_json import to_json
from baton.v1 import cluster_pb2, timing_pb2

POINTS = 60
_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLOURS = {
    cluster_pb2.BOUND_IDLE: "green",
    cluster_pb2.BOUND_NONE: "green",
    cluster_pb2.BOUND_WORKERS: "red",
}


@dataclass(frozen=True, slots=True)
class Picture:
    address: str
    status: cluster_pb2.StatusResponse
    diagnosis: cluster_pb2.Diagnosis
    trends: cluster_pb2.TrendsResponse
    recent: Sequence[timing_pb2.RequestTiming]

    def render(self) -> RenderableType:
        parts: list[RenderableType] = [
            status_table.render(self.status, self.address),
            "",
            *self._verdict(),
            "",
            self._charts(),
        ]
        if self.recent:
            parts += ["", waterfall.request_table(self.recent)]
        return Group(*parts)

    def fields(self) -> dict[str, object]:
        """The same for scripts."""
        return {
            "status": to_json(self.status),
            "diagnosis": to_json(self.diagnosis),
            "trends": to_json(self.trends),
            "recent": [to_json(request) for request in self.recent],
        }

    def _verdict(self) -> list[Text]:
        colour = _COLOURS.get(self.diagnosis.bound, "yellow")
        advice = [Text(f"  {line}", style="dim") for line in self.diagnosis.advice[:2]]
        return [Text(self.diagnosis.sentence, style=colour), *advice]

    def _charts(self) -> Table:
        points = self.trends.points[-POINTS:]
        each = self.trends.seconds_each or 1.0
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        rows: list[tuple[str, list[float], Callable[[float], str]]] = [
            ("TTFT p50", [point.ttft.p50 for point in points], waterfall.time_text),
            ("ITL p50", [point.itl.p50 for point in points], waterfall.time_text),
            ("tokens/s", [point.output_tokens / each for point in points], _rate),
        ]
        for name, values, say in rows:
            most = max(values, default=0.0)
            latest = next((value for value in reversed(values) if value), 0.0)
            table.add_row(name, Text(sparkline(values), "blue"), say(latest), f"max {say(most)}")
        return table


def sparkline(values: Sequence[float]) -> str:
    """One character a value; blank where it is 0."""
    most = max(values, default=0.0)
    steps = len(_BLOCKS) - 1
    heights = (max(1, round(steps * value / most)) if value else 0 for value in values)
    return "".join(_BLOCKS[height] for height in heights)


def _rate(value: float) -> str:
    return f"{value:,.1f}"

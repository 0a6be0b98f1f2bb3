"""A run's percentiles, rates and goodput, as a table, as JSON and as a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.cli.load_client import Call
from baton.core.errors import InvalidConfig
from baton.core.metrics import PERCENTILES, Spread


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits of a good answer; 0 sets none."""

    ttft_seconds: float = 0.0
    tpot_seconds: float = 0.0

    def met(self, call: Call) -> bool:
        ttft, tpot = self.ttft_seconds, self.tpot_seconds
        return (
            not call.error and (not ttft or call.ttft <= ttft) and (not tpot or call.tpot <= tpot)
        )


@dataclass(frozen=True, slots=True)
class LoadReport:
    requests: int
    failed: int
    errors: dict[str, int]
    seconds: float
    requests_per_second: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    ttft: Spread
    itl: Spread
    tpot: Spread
    e2e: Spread
    good: int
    goodput_per_second: float

    @classmethod
    def of(cls, calls: Sequence[Call], objective: Objective) -> LoadReport:
        done = [call for call in calls if not call.error]
        seconds = max((call.began + call.seconds for call in calls), default=0.0)
        scale = 1 / seconds if seconds else 0.0
        output = sum(call.output_tokens for call in done)
        good = sum(objective.met(call) for call in calls)
        return cls(
            requests=len(calls),
            failed=len(calls) - len(done),
            errors=dict(Counter(call.error for call in calls if call.error).most_common(5)),
            seconds=seconds,
            requests_per_second=len(done) * scale,
            prompt_tokens=sum(call.prompt_tokens for call in done),
            output_tokens=output,
            output_tokens_per_second=output * scale,
            ttft=Spread.of([call.ttft for call in done]),
            itl=Spread.of([gap for call in done for gap in call.gaps]),
            tpot=Spread.of([call.tpot for call in done if call.output_tokens > 1]),
            e2e=Spread.of([call.seconds for call in done]),
            good=good,
            goodput_per_second=good * scale,
        )


def render(report: LoadReport, objective: Objective) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for name in ("mean", *(f"p{percent}" for percent in PERCENTILES)):
        table.add_column(name, justify="right")
    rows = {
        "time to first token": report.ttft,
        "between deltas (ITL)": report.itl,
        "per token (TPOT)": report.tpot,
        "end to end": report.e2e,
    }
    for name, spread in rows.items():
        values = (spread.mean, spread.p50, spread.p90, spread.p99)
        table.add_row(name, *(_time(value) for value in values))
    return Group(_headline(report), "", table, "", *_goodput(report, objective), *_errors(report))


def _headline(report: LoadReport) -> Text:
    return Text(
        f"{report.requests - report.failed} of {report.requests} answered in"
        f" {report.seconds:.1f} s: {report.requests_per_second:.2f} requests a second,"
        f" {report.output_tokens_per_second:,.1f} tokens a second"
        f" ({report.prompt_tokens:,} prompt tokens, {report.output_tokens:,} generated)",
        style="bold",
    )


def _goodput(report: LoadReport, objective: Objective) -> list[Text]:
    wanted = []
    if objective.ttft_seconds:
        wanted.append(f"TTFT ≤ {_time(objective.ttft_seconds)}")
    if objective.tpot_seconds:
        wanted.append(f"TPOT ≤ {_time(objective.tpot_seconds)}")
    if not wanted:
        return []
    share = report.good / max(report.requests, 1)
    return [
        Text(
            f"goodput ({', '.join(wanted)}): {report.goodput_per_second:.2f} requests a second,"
            f" {share:.0%} of all"
        )
    ]


def _errors(report: LoadReport) -> list[Text]:
    return [Text(f"{count} x {error}", style="red") for error, count in report.errors.items()]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1.0 else f"{seconds:,.2f} s"


def plot(calls: Sequence[Call], path: Path) -> None:
    """Draws the distributions of times, and TTFT and TPOT over the run."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise InvalidConfig("a plot needs matplotlib: install baton-llm[plot]") from None
    done = [call for call in calls if not call.error]
    figure = Figure(figsize=(11, 4), layout="constrained")
    spread, course = figure.subplots(1, 2)
    curves = {
        "TTFT": [call.ttft for call in done],
        "ITL": [gap for call in done for gap in call.gaps],
        "end to end": [call.seconds for call in done],
    }
    for name, values in curves.items():
        spread.ecdf(values or [0.0], label=name)
    spread.set(xscale="log", xlabel="seconds", ylabel="share of requests", title="How long it took")
    spread.legend()
    course.scatter([call.began for call in done], [call.ttft for call in done], s=12, label="TTFT")
    course.scatter([call.began for call in done], [call.tpot for call in done], s=12, label="TPOT")
    course.set(yscale="log", xlabel="seconds into the run", ylabel="seconds", title="When")
    course.legend()
    figure.savefig(path, dpi=120)

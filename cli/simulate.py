"""`baton simulate`: what a cluster would do with a trace, without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from baton.cli.terminal import AsJson, print_json, print_lines
from baton.core.errors import InvalidConfig
from baton.core.metrics import Spread

if TYPE_CHECKING:
    from baton.planner.simulation_report import PoolUse, SimulationReport, TimedDecision
    from baton.planner.sizing import Goals
    from baton.planner.trace import TraceRequest


def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE.jsonl", help="In Mooncake's format.")],
    prefill: int = Option(1, min=1, help="Prefill workers."),
    decode: int = Option(1, min=1, help="Decode workers."),
    profile: Path | None = Option(
        None, help="A worker's costs, a JSON file. (default: an H200 with an 8B model)"
    ),
    ttft_slo: float = Option(4.0, help="Seconds to the first token."),
    itl_slo: float = Option(0.05, help="Seconds between two tokens."),
    copies: int = Option(1, min=1, help="Copies of the trace, replayed together."),
    minutes: float | None = Option(None, help="How long to repeat it. (default: once)"),
    load: str = Option("1", help="Densities for equal parts of that time: 1,2,1,0.5."),
    plan: bool = Option(False, "--plan", help="Let the planner change the pools, with reasons."),
    max_workers: int | None = Option(
        None, help="The planner's limit. (default: twice the initial workers)"
    ),
    least_prefill: int = Option(1, min=1, help="Prefill workers that the planner keeps."),
    least_decode: int = Option(1, min=1, help="Decode workers that the planner keeps."),
    as_json: AsJson = False,
) -> None:
    """Simulate a cluster that serves a trace: hit rate, TTFT, ITL, goodput, use of the pools."""
    from baton.planner.profile import H200_8B, load_profile
    from baton.planner.simulator import Setup, Simulator
    from baton.planner.sizing import Goals, Pools
    from baton.planner.trace import Traffic, arrivals

    workers = Pools(prefill, decode)
    least = Pools(least_prefill, least_decode)
    goals = Goals(ttft_slo, itl_slo, max_workers or 2 * workers.total, least=least)
    traffic = Traffic(copies, 60.0 * minutes if minutes else None, _parse_loads(load))
    setup = Setup(workers, load_profile(profile) if profile else H200_8B, goals, plan)
    report = Simulator(setup).run(arrivals(_read_trace(trace), traffic))
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        print_lines(_lines(report, goals))


def _read_trace(path: Path) -> list[TraceRequest]:
    from baton.planner.trace import read_trace

    try:
        if trace := read_trace(path):
            return trace
        why = "it has no request"
    except OSError as error:
        why = str(error)
    except (ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
    raise InvalidConfig(f"{path} is no trace: {why}", field="trace")


def _parse_loads(text: str) -> tuple[float, ...]:
    try:
        loads = tuple(float(each) for each in text.split(","))
    except ValueError:
        loads = ()
    if not loads or min(loads) <= 0:
        raise InvalidConfig(f"--load must be numbers above 0, as in 1,2,0.5; not {text}")
    return loads


def _lines(report: SimulationReport, goals: Goals) -> Iterator[str]:
    if report.decisions:
        yield from (line for planned in report.decisions for line in _decision(planned))
        yield ""
    yield f"{report.requests:,} requests in {report.seconds:,.0f} s"
    yield _row("hit rate (not computed)", f"{report.hit_rate:.1%}")
    yield _row("TTFT, ms", _spread(report.ttft))
    yield _row("ITL, ms", _spread(report.itl))
    yield _row(f"TTFT within {goals.ttft:g} s", f"{report.ttft_kept:.2%}")
    yield _row(f"mean ITL within {1e3 * goals.itl:g} ms", f"{report.itl_kept:.2%}")
    yield _row("both", f"{report.kept:.2%}")
    yield _row("goodput, requests/s", f"{report.goodput:.2f}")
    yield _row("prefill", _use(report.prefill))
    yield _row("decode", f"{_use(report.decode)}, batches of {report.mean_batch:.1f}")
    if report.most_queued:
        yield _row("longest wait queue", f"{report.most_queued:,}")


def _decision(planned: TimedDecision) -> Iterator[str]:
    decision = planned.decision
    minutes, seconds = divmod(round(planned.seconds), 60)
    have = f"{decision.have.prefill} + {decision.have.decode} workers"
    yield typer.style(f"{minutes:>4}:{seconds:02}  {decision.summary}", bold=True) + f"  ({have})"
    yield from (f"         {reason}" for reason in decision.reasons)


def _row(title: str, value: str) -> str:
    return f"  {title:<28}{value}"


def _spread(spread: Spread) -> str:
    names = ("mean", "p50", "p90", "p99")
    return ", ".join(f"{name} {1e3 * getattr(spread, name):,.1f}" for name in names)


def _use(use: PoolUse) -> str:
    return f"{use.workers:.1f} workers, busy {use.busy:.0%} of the time"

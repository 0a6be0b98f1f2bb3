"""Runs a simulation for `baton simulate`, and says what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import typer

from baton.core.errors import InvalidConfig
from baton.core.metrics import Spread
from baton.planner.profile import H200_8B, load_profile
from baton.planner.simulation_report import PoolUse, SimulationReport, TimedDecision
from baton.planner.simulator import Setup, Simulator
from baton.planner.sizing import Goals, Pools
from baton.planner.trace import TraceRequest, Traffic, arrivals, read_trace


def run(
    path: Path, traffic: Traffic, workers: Pools, goals: Goals, profile: Path | None, plans: bool
) -> SimulationReport:
    known = load_profile(profile) if profile else H200_8B
    setup = Setup(workers, known, goals, plans)
    return Simulator(setup).run(arrivals(_read(path), traffic))


def _read(path: Path) -> list[TraceRequest]:
    try:
        if trace := read_trace(path):
            return trace
        why = "there is no request in it"
    except OSError as error:
        why = str(error)
    except (ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
    raise InvalidConfig(f"{path} is no trace: {why}", field="trace")


def parse_loads(text: str) -> tuple[float, ...]:
    try:
        loads = tuple(float(each) for each in text.split(","))
    except ValueError:
        loads = ()
    if not loads or min(loads) <= 0:
        raise InvalidConfig(f"--load wants numbers above 0, as in 1,2,0.5; not {text}")
    return loads


def lines(report: SimulationReport, goals: Goals) -> Iterator[str]:
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
        yield _row("most in the router's line", f"{report.most_queued:,}")


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

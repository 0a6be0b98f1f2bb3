"""`baton simulate`: predicts how a cluster would serve a trace."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from typer import Option

from baton.cli.terminal import AsJson, print_json, print_lines
from baton.core.errors import InvalidConfig
from baton.core.metrics import Spread

if TYPE_CHECKING:
    from baton.planner.simulation_report import PoolUse, SimulationReport, TimedDecision
    from baton.planner.simulator import Setup
    from baton.planner.sizing import Goals, Pools
    from baton.planner.trace import TraceRequest, Traffic


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
    load: str = Option("1", help="Load factors for equal parts of that time: 1,2,1,0.5."),
    plan: bool = Option(False, "--plan", help="Let the planner change the pools, with reasons."),
    max_workers: int | None = Option(
        None, help="The planner's limit. (default: twice the initial workers)"
    ),
    least_prefill: int = Option(1, min=1, help="Prefill workers that the planner keeps."),
    least_decode: int = Option(1, min=1, help="Decode workers that the planner keeps."),
    model: list[str] = Option(
        [],
        metavar="NAME=P+D[,PROFILE]",
        help="A model of the trace, with its prefill and decode workers. Repeatable.",
    ),
    as_json: AsJson = False,
) -> None:
    """Simulate a cluster that serves a trace: hit rate, TTFT, ITL, goodput, use of the pools."""
    from baton.planner.sizing import Goals, Pools
    from baton.planner.trace import Traffic

    _check_above_0({"--ttft-slo": ttft_slo, "--itl-slo": itl_slo, "--minutes": minutes})
    goals = Goals(ttft_slo, itl_slo, max_workers or 0, least=Pools(least_prefill, least_decode))
    fleets = dict(map(_parse_fleet, model)) or {"": ModelFleet(Pools(prefill, decode), profile)}
    setups = {name: _setup(fleet, goals, plan=plan) for name, fleet in fleets.items()}
    traffic = Traffic(copies, 60.0 * minutes if minutes else None, _parse_loads(load))
    reports = _run(setups, _read_trace(trace), traffic)
    if not as_json:
        print_lines(_all_lines(reports, goals))
    elif model:
        print_json({"models": {name: dataclasses.asdict(each) for name, each in reports.items()}})
    else:
        print_json(dataclasses.asdict(reports[""]))


class ModelFleet(NamedTuple):
    """The workers of one model, and their costs."""

    workers: Pools
    profile: Path | None


def _parse_fleet(text: str) -> tuple[str, ModelFleet]:
    from baton.planner.sizing import Pools

    found = re.fullmatch(r"([^=]+)=([1-9]\d*)\+([1-9]\d*)(?:,(.+))?", text)
    if found is None:
        raise InvalidConfig(f"--model must be as in name=2+4 or name=2+4,profile.json; not {text}")
    name, prefill, decode, profile = found.groups()
    return name, ModelFleet(Pools(int(prefill), int(decode)), Path(profile) if profile else None)


def _setup(fleet: ModelFleet, goals: Goals, *, plan: bool) -> Setup:
    from baton.planner.profile import H200_8B, load_profile
    from baton.planner.simulator import Setup

    profile = load_profile(fleet.profile) if fleet.profile else H200_8B
    most = goals.most_workers or 2 * fleet.workers.total
    return Setup(fleet.workers, profile, dataclasses.replace(goals, most_workers=most), plan)


def _run(
    setups: dict[str, Setup], trace: list[TraceRequest], traffic: Traffic
) -> dict[str, SimulationReport]:
    """Returns reports by model. Models share no worker and no queue, so each is simulated alone
    with its own requests."""
    from baton.planner.simulator import Simulator
    from baton.planner.trace import arrivals, by_model

    named = by_model(trace)
    if named.keys() != setups.keys():
        raise InvalidConfig(
            f"the trace has requests to {_describe(named)}, but workers are given for"
            f" {_describe(setups)} (--model)",
            field="model",
        )
    return {
        name: Simulator(setup).run(each for each in arrivals(trace, traffic) if each.model == name)
        for name, setup in setups.items()
    }


def _read_trace(path: Path) -> list[TraceRequest]:
    from baton.planner.trace import read_trace

    try:
        if trace := read_trace(path):
            return trace
        why = "it has no request"
    except OSError as error:
        raise InvalidConfig(f"cannot read {path}: {error.strerror}", field="trace") from None
    except ValueError as error:
        why = str(error)
    raise InvalidConfig(f"{path} is not a trace: {why}", field="trace")


def _check_above_0(flags: dict[str, float | None]) -> None:
    for flag, value in flags.items():
        if value is not None and not 0 < value < math.inf:
            raise InvalidConfig(f"{flag} must be a number above 0, not {value:g}")


def _parse_loads(text: str) -> tuple[float, ...]:
    try:
        loads = tuple(float(each) for each in text.split(","))
    except ValueError:
        loads = ()
    if not loads or not all(0 < each < math.inf for each in loads):
        raise InvalidConfig(f"--load must be numbers above 0, as in 1,2,0.5; not {text}")
    return loads


def _describe(names: Iterable[str]) -> str:
    return ", ".join(name or "no model by name" for name in sorted(names))


def _all_lines(reports: dict[str, SimulationReport], goals: Goals) -> Iterator[str]:
    for name, report in reports.items():
        if name:
            yield typer.style(name, bold=True)
        yield from _lines(report, goals)


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

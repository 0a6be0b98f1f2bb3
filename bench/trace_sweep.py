"""Never worse: goodput of the local-prefill controller against always and never, point by point.

One set of workers, and one router per mode, since only the router knows the mode. For each
prompt length a calibration measures the capacity of the split cluster; a point offers a share
of it. The modes run in turn on the same arrivals, so that other load affects all of them. No
prompt is sent twice, so that no cache helps.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton import AsyncClient
from bench.trace_replay import Outcome, answer_at_once, replay
from bench.trace_report import Objective, summarize
from bench.trace_workload import FreshPrompts, TimedRequest

AUTO, NEVER, ALWAYS = "auto", "never", "always"
MODES = (AUTO, NEVER, ALWAYS)

CALIBRATION_REQUESTS = 6
SLACK = 4.0
"""Default objective: how many times as long as alone a good request may take."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The points of the sweep and their durations."""

    lengths: Sequence[int]
    loads: Sequence[float]  # shares of the cluster's capacity
    answer_tokens: int
    repeats: int
    seconds: float  # of one run; longer if it would have fewer than `least_requests`
    least_requests: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """The capacity of the split cluster for prompts of one length."""

    requests_per_second: float
    alone: Objective  # TTFT and ITL of a single request


@dataclass(frozen=True, slots=True)
class Repeats:
    """The results of one measurement's repeats."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def noise(self) -> float:
        """Half the range."""
        return (max(self.values) - min(self.values)) / 2

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.noise:.2f}"


def is_never_worse(goodput: Mapping[str, Repeats]) -> bool:
    """True if the controller reaches the better of the other two, each within its noise."""
    best = max((goodput[NEVER], goodput[ALWAYS]), key=lambda found: found.mean)
    auto = goodput[AUTO]
    return auto.mean + auto.noise >= best.mean - best.noise


class Sweep:
    """Runs the points of a grid with one client per mode."""

    def __init__(self, clients: Mapping[str, AsyncClient], grid: Grid, seed: int) -> None:
        self._clients = clients
        self._grid = grid
        self._prompts = FreshPrompts(seed)
        self._random = random.Random(seed)

    async def warm_up(self) -> None:
        """Runs every length in every mode, so that each router has measured its costs."""
        for client in self._clients.values():
            for length in self._grid.lengths:
                await self._at_once(client, length, 2)

    async def calibrate(self, length: int) -> Calibration:
        client = self._clients[NEVER]
        alone = [(await self._at_once(client, length, 1))[0] for _ in range(3)]
        began = time.perf_counter()
        await self._at_once(client, length, CALIBRATION_REQUESTS)
        taken = time.perf_counter() - began
        ttft = statistics.median(outcome.ttft for outcome in alone)
        itl = statistics.median(statistics.mean(outcome.gaps) for outcome in alone)
        return Calibration(CALIBRATION_REQUESTS / taken, Objective(ttft, itl))

    async def point(self, length: int, rate: float, objective: Objective) -> dict[str, Repeats]:
        """Goodput by mode, for `rate` prompts of this length per second."""
        found: dict[str, list[float]] = {mode: [] for mode in self._clients}
        for _ in range(self._grid.repeats):
            arrivals = self._arrivals(rate)
            for mode, client in self._clients.items():
                requests = [
                    TimedRequest(seconds, self._prompts.draw(length), self._grid.answer_tokens)
                    for seconds in arrivals
                ]
                outcomes = await replay(client, requests)
                found[mode].append(summarize(outcomes, objective, len(arrivals) / rate).goodput)
        return {mode: Repeats(tuple(values)) for mode, values in found.items()}

    def _arrivals(self, rate: float) -> list[float]:
        """Times of a Poisson process, from 0 on."""
        count = max(self._grid.least_requests, round(rate * self._grid.seconds))
        times = [0.0]
        while len(times) < count:
            times.append(times[-1] + self._random.expovariate(rate))
        return times

    async def _at_once(self, client: AsyncClient, length: int, count: int) -> list[Outcome]:
        prompts = [self._prompts.draw(length) for _ in range(count)]
        return await answer_at_once(client, prompts, self._grid.answer_tokens)


async def print_sweep(
    clients: Mapping[str, AsyncClient], grid: Grid, seed: int, objective: Objective | None
) -> None:
    """Prints one line per point, and finally at how many the controller was never worse."""
    sweep = Sweep(clients, grid, seed)
    await sweep.warm_up()
    print(f"goodput in requests/s: mean of {grid.repeats} ± half their range")
    print(_line(("prompt", "load", "offered", "TTFT, s", "ITL, s", *MODES, "never worse")))
    verdicts = []
    for length in grid.lengths:
        found = await sweep.calibrate(length)
        wanted = objective or Objective(SLACK * found.alone.ttft, SLACK * found.alone.itl)
        for load in grid.loads:
            rate = load * found.requests_per_second
            goodput = await sweep.point(length, rate, wanted)
            verdicts.append(is_never_worse(goodput))
            _print_point(length, load, rate, wanted, goodput)
    print(f"never worse at {sum(verdicts)} of {len(verdicts)} points")


def _print_point(
    length: int, load: float, rate: float, wanted: Objective, goodput: Mapping[str, Repeats]
) -> None:
    numbers = (f"{load:.0%}", f"{rate:.2f}", f"{wanted.ttft:.2f}", f"{wanted.itl:.3f}")
    verdict = "yes" if is_never_worse(goodput) else "NO"
    print(
        _line((str(length), *numbers, *(str(goodput[mode]) for mode in MODES), verdict)),
        flush=True,
    )


def _line(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>14}" for cell in cells)

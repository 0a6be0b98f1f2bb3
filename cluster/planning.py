"""The live planner: what routers report, round by round, and what is decided on it.

    routers ─Report, once a second─▶ window, backlog, costs ─round─▶ plan() ─▶ Decision
                                                                                │ planner.act
                                         the controller: roles, new workers, drains ◀┘

Deciding is planner/sizing.py's, the same as in the simulator. Nothing here is on a
request's path, and nothing is done here: the controller does it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.core.config import Config, settle
from baton.planner.sizing import Decision, Goals, Observation, PlannerState, Pools, plan
from baton.planner.traffic_window import TrafficWindow
from baton.router.placement.cost_model import STEP_PRIOR, Costs
from baton.v1 import cluster_pb2

REMEMBERED = 100
"""Decisions that changed something, or would have."""

SILENT_SECONDS = 5.0
"""A router that has not reported for so long is gone, and what waits there with it."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A decision, and when it was made (Unix time)."""

    at: float
    decision: Decision


@dataclass(frozen=True, slots=True)
class _Heard:
    at: float
    report: cluster_pb2.RouterReport


class Planning:
    def __init__(self, config: Config, *, gpus: bool) -> None:
        """`gpus` says whether workers have any, where the configuration leaves that open."""
        device = ("cuda" if gpus else "cpu") if config.device == "auto" else config.device
        settings = config.planner
        workers = config.prefill.workers + config.decode.workers
        self.goals = Goals(
            settings.ttft,
            settings.itl,
            settings.most_workers or workers,
            least=Pools(settings.least_prefill, settings.least_decode),
        )
        self.acts = settings.act
        self.round_seconds = settings.round_seconds
        self._max_batch = settle(config, device).decode.max_batch
        self._window = TrafficWindow(settings.round_seconds)
        self._heard: dict[str, _Heard] = {}  # the last of each router
        self._prompts, self._overhead_seconds = 0, 0.0  # of this round
        self._overhead = 0.0  # of the last round that had prompts, for one
        self._state = PlannerState()
        self.last: Planned | None = None
        self.changes: deque[Planned] = deque(maxlen=REMEMBERED)

    def report(self, report: cluster_pb2.RouterReport, now: float) -> None:
        """A router tells what it has seen since it told before."""
        window = self._window
        window.arrived(now, report.arrivals)
        for seconds in report.prompt_seconds:
            window.placed(seconds)
        window.answered(report.answers, report.answer_tokens, report.page_tokens)
        self._prompts += len(report.prompt_seconds)
        self._overhead_seconds += report.overhead_seconds
        self._heard[report.router_id] = _Heard(now, report)

    def round(self, have: Pools, now: float, clock: Callable[[], float] = time.time) -> Decision:
        """Ends a round: what to do about it, with so many workers that serve or soon will."""
        decision, self._state = plan(self._observe(have, now), self._state, self.goals)
        before = self.last.decision.missing if self.last else 0
        self.last = Planned(clock(), decision)
        if decision.is_news(before):
            self.changes.append(self.last)
        return decision

    @property
    def has_news(self) -> bool:
        """Whether the last round's decision is worth telling."""
        return bool(self.changes) and self.changes[-1] is self.last

    def _observe(self, have: Pools, now: float) -> Observation:
        self._heard = {
            name: heard for name, heard in self._heard.items() if now - heard.at <= SILENT_SECONDS
        }
        reports = [heard.report for heard in self._heard.values()]
        if self._prompts:
            self._overhead = self._overhead_seconds / self._prompts
        self._prompts, self._overhead_seconds = 0, 0.0
        # Of what workers tell, every router has heard; each has a line of its own.
        waiting = max((each.waiting for each in reports), default=0)
        return Observation(
            have=have,
            window=self._window.end_round(),
            costs=_costs(reports),
            max_batch=self._max_batch,
            pool_pages=max((each.decode_pages for each in reports), default=0) or 2**31,
            overhead_seconds=min(self._overhead, self.goals.ttft / 2),
            queued_seconds=max((each.queued_seconds for each in reports), default=0.0),
            waiting=waiting + sum(each.queued_requests for each in reports),
        )


def _costs(reports: list[cluster_pb2.RouterReport]) -> Costs:
    """As the busiest router has learned them: it has measured most."""
    known = [each for each in reports if len(each.step_costs) == len(STEP_PRIOR)]
    if not known:
        return Costs()
    busiest = max(known, key=lambda each: each.answer_tokens)
    return Costs(step=tuple(busiest.step_costs))

"""The live planner: collects routers' reports, decides once a round, and acts on the decision.

    routers ─Report, once a second─▶ window, backlog, costs ─round─▶ plan() ─▶ Decision
                                                                                │ planner.act
                                FleetManager: role switches, new workers, drains ◀┘

planner/sizing.py decides, as in the simulator. No request passes the planner.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

import ray

from baton.cluster.actors import switch_role
from baton.cluster.fleet_manager import FleetManager
from baton.core.config import Config, with_device_defaults
from baton.core.errors import BatonError
from baton.planner.sizing import (
    NONE,
    Decision,
    Goals,
    Observation,
    PlannerState,
    Pools,
    other,
    plan,
)
from baton.planner.traffic_window import TrafficWindow
from baton.router.placement.cost_model import STEP_PRIOR, Costs
from baton.v1 import cluster_pb2 as pb

log = logging.getLogger(__name__)

REMEMBERED_ROUNDS = 100
"""Rounds to list that changed the pools, or would have."""

ROUTER_SILENT_SECONDS = 5.0
"""A router that has not reported for this long counts as gone, with its queue."""


class PlanRounds:
    """A model's planning rounds: collects routers' reports in each, and decides at its end."""

    def __init__(self, config: Config, *, gpus: bool) -> None:
        """`gpus` decides what device "auto" means: workers with or without GPUs."""
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
        self._max_batch = with_device_defaults(config, device).decode.max_batch
        self._window = TrafficWindow(settings.round_seconds)
        # By router: the last report, and when it came.
        self._reports: dict[str, tuple[float, pb.RouterReport]] = {}
        self._prompts, self._overhead_seconds = 0, 0.0  # of this round
        self._overhead = 0.0  # seconds for each prompt, in the last round with prompts
        self._state = PlannerState()
        self._missing = 0  # workers, in the last round
        self._last: pb.PlannedRound | None = None
        self._changes: deque[pb.PlannedRound] = deque(maxlen=REMEMBERED_ROUNDS)

    def report(self, report: pb.RouterReport, now: float | None = None) -> None:
        """Adds a router's traffic since its last report."""
        now = time.monotonic() if now is None else now
        window = self._window
        window.arrived(now, report.arrivals)
        for seconds in report.prompt_seconds:
            window.placed(seconds)
        window.answered(report.answers, report.answer_tokens, report.page_tokens)
        self._prompts += len(report.prompt_seconds)
        self._overhead_seconds += report.overhead_seconds
        self._reports[report.router_id] = now, report

    def end(self, have: Pools, now: float, clock: Callable[[], float] = time.time) -> Decision:
        """Ends a round and decides. `have` counts serving and starting workers."""
        decision, self._state = plan(self._observe(have, now), self._state, self.goals)
        self._last = pb.PlannedRound(
            at=clock(),
            summary=decision.summary,
            reasons=decision.reasons,
            have_prefill=have.prefill,
            have_decode=have.decode,
            need_prefill=decision.need.prefill,
            need_decode=decision.need.decode,
        )
        if decision.is_news(self._missing):
            self._changes.append(self._last)
            log.info("plan: %s (%s)", decision.summary, "; ".join(decision.reasons))
        self._missing = decision.missing
        return decision

    def describe(self) -> pb.PlanResponse:
        return pb.PlanResponse(
            enabled=True,
            acts=self.acts,
            ttft=self.goals.ttft,
            itl=self.goals.itl,
            most_workers=self.goals.most_workers,
            least_prefill=self.goals.least.prefill,
            least_decode=self.goals.least.decode,
            last=self._last,
            changes=reversed(self._changes),
        )

    def _observe(self, have: Pools, now: float) -> Observation:
        self._reports = {
            name: (at, report)
            for name, (at, report) in self._reports.items()
            if now - at <= ROUTER_SILENT_SECONDS
        }
        reports = [report for _, report in self._reports.values()]
        if self._prompts:
            self._overhead = self._overhead_seconds / self._prompts
        self._prompts, self._overhead_seconds = 0, 0.0
        # Every router reports the same requests waiting on workers, and its own queue.
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


def _costs(reports: list[pb.RouterReport]) -> Costs:
    """Returns the estimates of the busiest router, which has measured most."""
    known = [each for each in reports if len(each.step_costs) == len(STEP_PRIOR)]
    if not known:
        return Costs()
    busiest = max(known, key=lambda each: each.answer_tokens)
    return Costs(step=tuple(busiest.step_costs))


async def run_planner(rounds: PlanRounds, manager: FleetManager, model: str) -> None:
    """Runs a model's rounds and acts on their decisions.

    A worker counts in its new pool as soon as it is asked to switch roles. New workers become
    actors at once: Ray's autoscaler adds nodes for actors that wait for resources. Surplus workers
    always drain.
    """
    while True:
        await asyncio.sleep(rounds.round_seconds)
        decision = rounds.end(manager.expected(model), time.monotonic())
        if not decision.changes or not rounds.acts:
            continue
        try:
            await _act(decision, manager, model)
        except (BatonError, ray.exceptions.RayError) as error:
            log.warning("cannot carry out the plan: %s", error)


async def _act(decision: Decision, manager: FleetManager, model: str) -> None:
    if switch := decision.switch:
        # The least busy workers.
        for name in manager.serving(other(switch.to), model)[: switch.count]:
            manager.permit_switch(name, switch.to)
            await asyncio.to_thread(switch_role, name, switch.to)
    # The fleet counts switching workers in their old pool: drain no worker meanwhile.
    drain = NONE if manager.is_switching else decision.drain
    if decision.add != NONE or drain != NONE:
        wanted, add = manager.fleet.wanted_of(model), decision.add
        await manager.scale(
            model,
            prefill=wanted.prefill + add.prefill - drain.prefill,
            decode=wanted.decode + add.decode - drain.decode,
        )

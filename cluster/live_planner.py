"""Carries out what is planned (cluster/planning.py), for the controller that owns the pools.

A worker that changes its role counts where it is going from the moment it is
told. New workers are made as actors at once: where no node has room for one, it
waits, and an actor that waits is what Ray's autoscaler adds nodes for. Workers
go only by being drained.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import ray

from cluster.planning import Planning
from cluster.worker_actors import switch_role
from core.errors import BatonError
from core.types import Role
from planner.plan import Decision, Switch
from planner.pools import NONE, Pools, other

if TYPE_CHECKING:
    from cluster.controller import Controller

log = logging.getLogger(__name__)

SWITCH_SECONDS = 30.0
"""Beyond `drain_seconds`: a worker that has not changed its role by then goes on as it was."""


class LivePlanner:
    def __init__(self, controller: Controller, planning: Planning, drain_seconds: float) -> None:
        self._controller = controller
        self._planning = planning
        self._switch_seconds = drain_seconds + SWITCH_SECONDS
        self._switching: dict[str, tuple[Role, float]] = {}  # and until when that is awaited

    async def run(self) -> None:
        """Decides once a round, for ever."""
        while True:
            await asyncio.sleep(self._planning.round_seconds)
            now = time.monotonic()
            self._note_switched(now)
            decision = self._planning.round(self._have(), now)
            if self._planning.has_news:
                log.info("plan: %s (%s)", decision.words, "; ".join(decision.reasons))
            if decision.changes and self._planning.acts:
                await self._carry_out(decision, now)

    def _have(self) -> Pools:
        """Workers that serve or start, those that change their role where they are going."""
        have = self._controller.fleet.wanted
        for role, _ in self._switching.values():
            have = have.with_more(role, 1).with_more(other(role), -1)
        return have

    def _note_switched(self, now: float) -> None:
        workers = self._controller.fleet.workers
        self._switching = {
            name: (role, until)
            for name, (role, until) in self._switching.items()
            if workers.get(name) is other(role) and now < until
        }

    async def _carry_out(self, decision: Decision, now: float) -> None:
        try:
            if decision.switch:
                await self._switch(decision.switch, now)
            # While workers change their roles the fleet counts them where they were: none of
            # them is to be drained by mistake.
            drain = NONE if self._switching else decision.drain
            if decision.add != NONE or drain != NONE:
                now_wanted, add = self._controller.fleet.wanted, decision.add
                await self._controller.scale(
                    Pools(
                        now_wanted.prefill + add.prefill - drain.prefill,
                        now_wanted.decode + add.decode - drain.decode,
                    )
                )
        except (BatonError, ray.exceptions.RayError) as error:
            log.warning("the plan could not be carried out: %s", error)

    async def _switch(self, switch: Switch, now: float) -> None:
        """Has those change their role that are missed least."""
        ready = self._controller.serving(other(switch.to))
        able = [name for name in ready if name not in self._switching]
        for name in able[: switch.count]:
            self._switching[name] = (switch.to, now + self._switch_seconds)
            await asyncio.to_thread(switch_role, name, switch.to)

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

from baton.cluster.planning import Planning
from baton.cluster.worker_actors import switch_role
from baton.core.errors import BatonError
from baton.planner.sizing import NONE, Decision, Switch, other

if TYPE_CHECKING:
    from baton.cluster.controller import Controller

log = logging.getLogger(__name__)


class LivePlanner:
    def __init__(self, controller: Controller, planning: Planning) -> None:
        self._controller = controller
        self._planning = planning

    async def run(self) -> None:
        """Decides once a round, for ever."""
        while True:
            await asyncio.sleep(self._planning.round_seconds)
            decision = self._planning.round(self._controller.expected, time.monotonic())
            if self._planning.has_news:
                log.info("plan: %s (%s)", decision.summary, "; ".join(decision.reasons))
            if decision.changes and self._planning.acts:
                await self._carry_out(decision)

    async def _carry_out(self, decision: Decision) -> None:
        try:
            if decision.switch:
                await self._switch(decision.switch)
            # While workers change their roles the fleet counts them where they were: none of
            # them is to be drained by mistake.
            drain = NONE if self._controller.changing_roles else decision.drain
            if decision.add != NONE or drain != NONE:
                now_wanted, add = self._controller.fleet.wanted, decision.add
                await self._controller.scale(
                    prefill=now_wanted.prefill + add.prefill - drain.prefill,
                    decode=now_wanted.decode + add.decode - drain.decode,
                )
        except (BatonError, ray.exceptions.RayError) as error:
            log.warning("the plan could not be carried out: %s", error)

    async def _switch(self, switch: Switch) -> None:
        """Has those change their role that are missed least."""
        for name in self._controller.serving(other(switch.to))[: switch.count]:
            self._controller.permit_switch(name, switch.to)
            await asyncio.to_thread(switch_role, name, switch.to)

"""Decides every change of the fleet. A change is saved before anything acts on it.

members ─report, once a second─▶ FleetManager ◀─ operators, the planner
                                      │ Fleet
                                      ▼
                        controller.py: makes, drains and kills actors
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from baton.cluster import ray_session
from baton.cluster.fleet import DRAINED, DRAINING, Fleet, Member, MemberTable, RoleSwitches
from baton.core import model_store
from baton.core.config import Config, served_configs
from baton.core.config_values import MAX_WORKERS
from baton.core.errors import InvalidRequest, RoleRefused, Unavailable
from baton.core.types import Role
from baton.planner.sizing import NONE, Pools, other

REMEMBERED_WORKERS = 256
"""Drained workers that are still listed for operators."""

LEARNING_SECONDS = 5.0
"""How long a controller waits for the expected members after its start."""

SWITCH_SECONDS = 30.0
"""Added to `drain_seconds`: a worker that has not switched by then keeps its role."""


class FleetManager:
    def __init__(self, config: Config) -> None:
        self._allows_local_prefill = config.router.local_prefill != "never"
        self._switches = RoleSwitches(config.drain_seconds + SWITCH_SECONDS, time.monotonic)
        self._learned_at = time.monotonic() + LEARNING_SECONDS
        self._drained: deque[Member] = deque(maxlen=REMEMBERED_WORKERS)
        self._changing = asyncio.Lock()
        self.changed = asyncio.Event()  # set after each change, and when a worker drains
        first = model_store.model_name(served_configs(config)[0])
        self.fleet = ray_session.load_fleet().with_default_model(first)
        self.members = MemberTable()
        # By model and role: what workers without a process wait for.
        self.waits: dict[tuple[str, Role], str] = {}

    @property
    def has_learned(self) -> bool:
        """True once every worker has reported since the start, or LEARNING_SECONDS have passed."""
        return self.is_past_learning or self.members.latest.keys() >= self.fleet.workers.keys()

    @property
    def is_past_learning(self) -> bool:
        return time.monotonic() >= self._learned_at

    def all_members(self) -> list[Member]:
        """Returns members, workers that have not reported yet, and recently drained workers."""
        models, waits = self.fleet.models, self.waits
        awaited = [
            Member(name, role, host="", progress=waits.get((models[name], role), "starting"))
            for name, role in self.fleet.workers.items()
            if name not in self.members.latest
        ]
        return [*self.members.current, *awaited, *self._drained]

    async def scale(
        self, model: str, *, prefill: int | None = None, decode: int | None = None
    ) -> None:
        """Changes the number of a model's workers; None keeps a pool's number. Surplus workers
        drain. Returns once the change is saved."""
        await self.change(lambda fleet: self._scaled(fleet, model, prefill, decode))

    async def retire_all(self, model: str) -> None:
        """Drains all workers of a model."""
        if self.fleet.wanted_of(model).total:
            await self.change(lambda fleet: fleet.scaled(NONE, self._spare(), model))

    def _scaled(self, fleet: Fleet, model: str, prefill: int | None, decode: int | None) -> Fleet:
        now = fleet.wanted_of(model)
        wanted = Pools(
            now.prefill if prefill is None else prefill, now.decode if decode is None else decode
        )
        for role in Role:
            # A pool may have lost its last worker to a role switch, or to an operator.
            if wanted.of(role) != now.of(role) and not 1 <= wanted.of(role) <= MAX_WORKERS:
                raise InvalidRequest(
                    f"{wanted.of(role)} {role} workers: the limits are 1 and {MAX_WORKERS}",
                    field=role.value,
                )
        switching = self._switches.names(fleet) & set(fleet.of_model(model))
        if switching and now.beyond(wanted).total:
            names = ", ".join(sorted(switching))
            raise Unavailable(f"{names} may still switch roles: no worker can be drained now")
        return fleet.scaled(wanted, self._spare(), model)

    def permit_switch(self, name: str, role: Role) -> None:
        """Permits a worker's role switch and counts the worker in its new pool from now on.
        Raises RoleRefused if it is the last of its old pool."""
        if not self.has_learned:
            raise Unavailable("the controller has just started: try again in some seconds")
        replaced = role is Role.DECODE and self._allows_local_prefill
        model = self.fleet.models.get(name, "")
        if not replaced and not set(self.serving(other(role), model)) - {name}:
            raise RoleRefused(
                f"{name} is the last {other(role).value} worker that serves and keeps its role;"
                " without it no request could be served"
            )
        self._switches.begin(name, role)

    @property
    def is_switching(self) -> bool:
        return bool(self._switches.names(self.fleet))

    def expected(self, model: str) -> Pools:
        """Counts a model's serving and starting workers, with pending role switches as done."""
        return self._switches.expected(self.fleet, model)

    def serving(self, role: Role, model: str) -> list[str]:
        """Names the workers that serve a role and model and will keep it, least busy first."""
        fleet = self.fleet
        leaving = fleet.retiring | self._switches.names(fleet)
        return [
            name
            for name in self._spare()
            if fleet.workers[name] is role
            and fleet.models[name] == model
            and name not in leaving
            and self.members.serves(name)
        ]

    def _spare(self) -> list[str]:
        """Sorts the workers by what draining them costs: first those that do not serve, then
        those with the fewest requests, then the youngest."""

        def cost(name: str) -> tuple[bool, int, int]:
            member = self.members.latest.get(name)
            requests = member.requests if member else 0
            return self.members.serves(name), requests, -int(name.rpartition("-")[2])

        return sorted(self.fleet.workers, key=cost)

    async def change(self, step: Callable[[Fleet], Fleet]) -> None:
        """Saves a change, then applies it. Completes even if the caller is cancelled."""
        await asyncio.shield(self._change(step))

    async def _change(self, step: Callable[[Fleet], Fleet]) -> None:
        async with self._changing:
            fleet = step(self.fleet)
            await asyncio.to_thread(ray_session.save_fleet, fleet)
            self.fleet = fleet
        self.changed.set()

    async def forget(self, name: str) -> None:
        """Removes a worker for good. A drained one is still listed."""
        await self.change(partial(Fleet.without, name=name))
        member = self.members.latest.get(name)
        if member and member.progress == DRAINED:
            self._drained.append(member)
        self.members.forget(name)

    async def follow_members(self) -> None:
        """Updates the fleet from members' reports: workers drain and switch roles by
        themselves."""
        for name, role in self.fleet.workers.items():
            member = self.members.latest.get(name)
            if not member:
                continue
            if member.progress == DRAINED:
                await self.forget(name)
            elif member.progress == DRAINING and name not in self.fleet.retiring:
                await self.change(partial(Fleet.retired, name=name))
            elif member.role and member.role is not role:
                await self.change(partial(Fleet.switched, name=name, role=member.role))

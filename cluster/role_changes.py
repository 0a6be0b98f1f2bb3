"""The workers that are about to change their roles, whoever asked for it.

    begun ─the worker tells of its new role, or has gone─▶ over
      └────neither within `seconds`────────────────────▶ over: it goes on as it was

The controller keeps them: where every change is agreed to in one place, two that are asked of
different routers at the same moment cannot take the last two workers of a role.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.cluster.fleet import Fleet
from baton.core.types import Role
from baton.planner.sizing import Pools, other


@dataclass(frozen=True, slots=True)
class _Change:
    role: Role
    until: float


class RoleChanges:
    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        """`seconds` are what a worker has to drain and to take up its new role."""
        self._seconds = seconds
        self._clock = clock
        self._changes: dict[str, _Change] = {}

    def begin(self, name: str, role: Role) -> None:
        """The worker is told to take up a role."""
        self._changes[name] = _Change(role, self._clock() + self._seconds)

    def names(self, fleet: Fleet) -> set[str]:
        """The workers of the fleet that are not yet what they are to become."""
        now = self._clock()
        self._changes = {
            name: change
            for name, change in self._changes.items()
            if fleet.workers.get(name) is other(change.role) and now < change.until
        }
        return set(self._changes)

    def counted(self, fleet: Fleet) -> Pools:
        """How many workers each pool is to have, these counted where they are going."""
        wanted = fleet.wanted
        for name in self.names(fleet) - fleet.retiring:
            role = self._changes[name].role
            wanted = wanted.with_more(role, 1).with_more(other(role), -1)
        return wanted

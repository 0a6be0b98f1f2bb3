"""The cluster's processes as they report themselves to the controller, once a second each."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.core.types import Role

CONTROLLER = "controller"
"""The controller's name in the cluster's Ray namespace."""

ROUTER = "router-0"
"""The name of the first router; see `router_name`."""

DRAINING = "draining"
"""Progress of a worker that takes nothing new, and ends with its last request."""

DRAINED = "drained"
"""Progress of a worker that has drained and ended, and must not come back."""

SILENT_SECONDS = 10.0
"""A member that has not reported for this long does not count as serving."""

SILENT = "silent: lost, frozen, or waiting for a place"
"""Progress of such a member."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the cluster, and how far it has started."""

    worker_id: str
    role: Role | None  # None for a router
    host: str  # to listen on; empty means its node's address
    progress: str = "starting"
    address: str = ""  # "host:port" while it serves
    http: str = ""  # a router's address for HTTP, if it serves that
    metrics: str = ""  # a router's address for metrics
    error: str = ""  # why it cannot start
    pid: int = 0  # another one after a restart
    agent: str = ""  # a serving worker's transport agent, another one after a restart
    requests: int = 0  # a worker's, running or waiting


def router_name(index: int) -> str:
    return f"router-{index}"


def is_router(actor: str) -> bool:
    return actor.startswith("router-")


def is_worker(actor: str) -> bool:
    return actor.startswith(tuple(f"{role.value}-" for role in Role))


class MemberTable:
    """The latest report of every member.

    A member that served and is silent is lost, frozen, or waits for a place to restart. Routers
    keep it, since they check themselves whether it answers; operators and scaling see it as not
    serving.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._reported_at: dict[str, float] = {}

    def report(self, member: Member) -> Member | None:
        """Returns the member's report before this one."""
        before = self._members.get(member.worker_id)
        self._members[member.worker_id] = member
        self._reported_at[member.worker_id] = self._clock()
        return before

    def forget(self, name: str) -> None:
        self._members.pop(name, None)
        self._reported_at.pop(name, None)

    def find(self, name: str) -> Member | None:
        return self._members.get(name)

    @property
    def names(self) -> set[str]:
        return set(self._members)

    @property
    def reported(self) -> list[Member]:
        """All members, as they last reported."""
        return list(self._members.values())

    @property
    def current(self) -> list[Member]:
        """All members; silent ones have no address."""
        return [
            dataclasses.replace(member, progress=SILENT, address="")
            if member.address and not self.serves(name)
            else member
            for name, member in self._members.items()
        ]

    def serves(self, name: str) -> bool:
        member = self._members.get(name)
        silent = self._clock() - self._reported_at.get(name, 0.0) > SILENT_SECONDS
        return bool(member and member.address) and not silent

    def requests(self, name: str) -> int:
        """A worker's requests, running or waiting; 0 when unknown."""
        member = self._members.get(name)
        return member.requests if member else 0

"""What a process of the cluster tells the controller about itself."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.types import Role

CONTROLLER = "controller"
"""The controller's name in the cluster's Ray namespace."""

ROUTER = "router-0"
"""The name of the first router; see `router_name`."""

DRAINING = "draining"
"""The progress of a worker that takes nothing new, and ends when what it runs has."""

DRAINED = "drained"
"""The progress of a worker that has ended because it was told to, and is not to come back."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the cluster, as far as it has come."""

    worker_id: str
    # None for a router.
    role: Role | None
    # Where it listens; empty means at its node's address.
    host: str
    progress: str = "starting"
    # "host:port" once it serves.
    address: str = ""
    # For a router, where it speaks HTTP, if it does, and where its metrics are.
    http: str = ""
    metrics: str = ""
    # Why it cannot start, when it cannot.
    error: str = ""
    # Its process: another one after a restart.
    pid: int = 0
    # The transport agent of a worker that serves: another one after a restart too.
    agent: str = ""
    # Requests that a worker has, running or waiting.
    requests: int = 0


def router_name(index: int) -> str:
    return f"router-{index}"


def is_router(name: str) -> bool:
    """Whether an actor of the cluster's namespace is a router."""
    return name.startswith("router-")


def is_worker(name: str) -> bool:
    """Whether it is a worker."""
    return name.startswith(tuple(f"{role.value}-" for role in Role))

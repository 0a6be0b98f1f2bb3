"""The Ray actors: each is one process that runs one of our servers.

    constructor ─▶ starting ─▶ serving ─stop() or drained─▶ ended
                       │         │
                       │         └─drained, to restart─┐
                       └─────────┴─error─▶ failed ─────┴▶ the process ends ─Ray─▶ constructor

The constructor starts a thread (cluster/server_threads.py). Ray restarts a dead actor by calling
its constructor again; the new process reports its new address to the controller.

An actor has no coroutines: of a class with any, Ray runs all methods on one event loop, where
`stop` would hold up `hurry`, and the constructor in a thread that cannot handle signals.
"""

from __future__ import annotations

import signal
from types import FrameType

import ray

from baton.cluster.fleet import Member
from baton.cluster.preflight import describe_wait, gpus_of, within_share
from baton.cluster.ray_session import find_actor
from baton.cluster.server_threads import RouterThread, ServerThread, WorkerThread
from baton.core import config as configs
from baton.core.config import Config
from baton.core.types import Role

CONCURRENCY = 2
"""Concurrent calls to one actor: `hurry` comes while `stop` runs."""


class _ServerActor:
    def __init__(self, thread: ServerThread) -> None:
        self._thread = thread

    def stop(self) -> None:
        self._thread.stop()

    def hurry(self) -> None:
        self._thread.hurry()


class WorkerActor(_ServerActor):
    """One worker of either role."""

    _thread: WorkerThread

    def __init__(self, tree: dict[str, object], member: Member) -> None:
        super().__init__(WorkerThread(tree, member))
        self._rays_handler = signal.signal(signal.SIGTERM, self._on_sigterm)

    def drain(self) -> None:
        self._thread.drain()

    def restart(self) -> None:
        self._thread.restart()

    def switch_role(self, role: Role) -> None:
        self._thread.switch_role(role)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Restarts in good order; a second one ends the process at once, as Ray's handler does."""
        signal.signal(number, self._rays_handler)
        if self._thread.serving:
            self.restart()
        else:
            signal.raise_signal(number)


class RouterActor(_ServerActor):
    """One router."""

    def __init__(self, tree: dict[str, object], member: Member, controller_address: str) -> None:
        super().__init__(RouterThread(tree, member, controller_address))


class WorkerActors:
    """Makes a model's worker actors. They are detached: they outlive the process that made them,
    which may be the command that started the cluster or an earlier controller. Blocks on Ray's
    head, so not for an event loop."""

    def __init__(self, config: Config, gpus: float, *, joined: bool) -> None:
        """`gpus` are those of one process of a worker, unless the configuration names a number or
        the CPU. On a joined Ray, workers may be on any node, and listen at its address."""
        self._config = config
        self._gpus = 0.0 if config.device == "cpu" else gpus
        self._joined = joined

    def waits_for(self, role: Role) -> str:
        """Why a worker of this role has no process yet."""
        pool = self._config.pool(role)
        wanted = {"GPU": gpus_of(self._config, role, self._gpus), **pool.resources}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return describe_wait({name: amount for name, amount in wanted.items() if amount}, nodes)

    def make(self, name: str, role: Role) -> None:
        """Ray restarts a worker that dies, always. An existing one stays."""
        gpus = gpus_of(self._config, role, self._gpus)
        actor = ray.remote(WorkerActor).options(
            name=name,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=CONCURRENCY,
            num_cpus=0,
            num_gpus=gpus,
            resources=dict(self._config.pool(role).resources),
            scheduling_strategy="SPREAD",
        )
        host = "" if self._joined else self._config.pool(role).host
        config = within_share(self._config, gpus)
        actor.remote(configs.dump(config), Member(name, role, host))


def drain(name: str) -> None:
    """Drains the worker of that name, for good."""
    if actor := find_actor(name):
        actor.drain.remote()


def switch_role(name: str, role: Role) -> None:
    if actor := find_actor(name):
        actor.switch_role.remote(role)

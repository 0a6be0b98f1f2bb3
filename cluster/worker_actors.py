"""Makes worker actors, finds those that are there, and ends them.

They are detached: they outlive the process that made them, which may be the
command that starts a cluster or a controller that has been started again since.
All of this waits for Ray's head, so none of it is for an event loop.
"""

from __future__ import annotations

from typing import Any

import ray

from cluster.actors import WorkerActor
from cluster.member import Member
from core import config as configs
from core.config import Config
from core.errors import InvalidConfig
from core.types import Role

# Of calls to one actor: it can be told to hurry while it stops.
CONCURRENCY = 2


def gpus_per_worker(config: Config) -> float:
    """One GPU a worker, or an equal share where there are fewer GPUs than workers."""
    total = float(ray.cluster_resources().get("GPU", 0))
    if config.device == "cuda" and not total:
        raise InvalidConfig("device is cuda, but Ray sees no GPU", field="device")
    if config.device == "cpu":
        return 0.0
    return min(1.0, total / (config.prefill.workers + config.decode.workers))


def find(name: str) -> Any | None:
    """The actor of that name; None when it is gone."""
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def drain(name: str) -> None:
    """Has the worker of that name take nothing new and, when what runs has ended, leave."""
    if actor := find(name):
        actor.drain.remote()


def switch_role(name: str, role: Role) -> None:
    """Has the worker of that name drain, and go on in another role."""
    if actor := find(name):
        actor.switch_role.remote(role)


def kill(name: str) -> None:
    """For good."""
    if actor := find(name):
        ray.kill(actor)


class WorkerActors:
    def __init__(self, config: Config, gpus: float, *, joined: bool) -> None:
        """`gpus` is for a worker whose configuration names no number. On a Ray that was joined,
        workers may be on any node, and listen at its address."""
        self._config = config
        self._gpus = gpus
        self._joined = joined

    def make(self, name: str, role: Role) -> None:
        """A worker that dies starts again, for ever, and rejoins. One that is there stays."""
        actor = ray.remote(WorkerActor).options(
            name=name,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=CONCURRENCY,
            num_cpus=0,
            num_gpus=self._num_gpus(role),
            resources=dict(self._config.pool(role).resources),
            scheduling_strategy="SPREAD",
        )
        host = "" if self._joined else self._config.pool(role).host
        actor.remote(configs.dump(self._config), Member(name, role, host))

    def _num_gpus(self, role: Role) -> float:
        """All of them are of one node."""
        gpus = self._config.pool(role).gpus
        return self._gpus if gpus is None else gpus

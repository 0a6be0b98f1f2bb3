"""Makes worker actors, finds those that are there, and ends them.

They are detached: they outlive the process that made them, which may be the
command that starts a cluster or a controller that has been started again since.
All of this waits for Ray's head, so none of it is for an event loop.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import ray

from baton.cluster.actors import WorkerActor
from baton.cluster.member import Member
from baton.core import config as configs
from baton.core.config import Config
from baton.core.errors import InvalidConfig
from baton.core.types import Role

# Of calls to one actor: it can be told to hurry while it stops.
CONCURRENCY = 2

# Of shares of a GPU that are added up.
ROUNDING = 1e-6


def gpus_of_ray() -> float:
    """Those of all nodes that there are."""
    return float(ray.cluster_resources().get("GPU", 0))


def gpus_per_rank(config: Config, total: float, *, joined: bool) -> float:
    """For each process of a worker: one GPU, or an equal share where there are fewer GPUs.

    Raises InvalidConfig where a Ray of our own, to which nothing is added, has too few.
    """
    if config.device == "cuda" and not total and not (joined and _names_gpus(config)):
        raise InvalidConfig(
            "device is cuda, but Ray sees no GPU; where it adds nodes that have some, say how many"
            " each worker wants (prefill.gpus, decode.gpus)",
            field="device",
        )
    if config.device == "cpu":
        return 0.0
    ranks = sum(pool.workers * pool.tensor_parallel for pool in (config.prefill, config.decode))
    # As many on each GPU: shares that sum up to all GPUs might fit on none of them.
    share = 1 / math.ceil(ranks / total) if total else 0.0
    wanted = sum(config.pool(role).workers * gpus_of(config, role, share) for role in Role)
    if wanted > total + ROUNDING and not joined:
        raise InvalidConfig(
            f"the workers want {wanted:g} GPUs, and there are {total:g}; fewer workers, or a"
            " smaller tensor_parallel, want less",
            field="gpus",
        )
    return share


def _names_gpus(config: Config) -> bool:
    return bool(config.prefill.gpus and config.decode.gpus)


def gpus_of(config: Config, role: Role, share: float) -> float:
    """What a worker of this role asks Ray for: GPUs of one node, since it is one actor. `share`
    is what a process of a worker can have."""
    pool = config.pool(role)
    if pool.gpus is not None:
        return pool.gpus
    if pool.tensor_parallel == 1 or not share:
        return share
    if share < 1 and config.ranks_share_gpus:
        return min(1.0, share * pool.tensor_parallel)
    return float(pool.tensor_parallel)


def within_share(config: Config, gpus: float) -> Config:
    """`config` for a worker with so many GPUs: of a part of one, it takes a part of the memory."""
    if config.gpu_memory or not 0 < gpus < 1:
        return config
    return dataclasses.replace(config, gpu_memory=configs.GPU_MEMORY * gpus)


def waiting_words(wanted: Mapping[str, float], nodes: Iterable[Mapping[str, float]]) -> str:
    """What a worker waits for that asks for so much of one node; `nodes` is what each has in
    all."""
    for node in nodes:
        if all(node.get(name, 0.0) >= amount for name, amount in wanted.items()):
            return "waiting for a place"
    asked = ", ".join(f"{name}: {amount:g}" for name, amount in wanted.items())
    return f"waiting for a node that has {asked}: none has"


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
        """`gpus` are those of one process of a worker, where the configuration names no number.
        On a Ray that was joined, workers may be on any node, and listen at its address."""
        self._config = config
        self._gpus = gpus
        self._joined = joined

    def waits_for(self, role: Role) -> str:
        """Why a worker of this role that was made is not there yet."""
        pool = self._config.pool(role)
        wanted = {"GPU": gpus_of(self._config, role, self._gpus), **pool.resources}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return waiting_words({name: amount for name, amount in wanted.items() if amount}, nodes)

    def make(self, name: str, role: Role) -> None:
        """A worker that dies starts again, for ever, and rejoins. One that is there stays."""
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

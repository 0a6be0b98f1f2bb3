"""Starts and stops a cluster on Ray.

start()  joins or starts Ray, makes the actors, returns when requests can be served
stop()   ends every actor in order and, where it was started here, Ray itself
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray

from cluster.actors import RouterActor, WorkerActor
from cluster.controller import CONTROLLER, Controller, Member
from core import config as configs
from core.config import Config
from core.errors import DeadlineExceeded, InvalidConfig, Unavailable
from core.types import Role

NAMESPACE = "baton"
ROUTER = "router-0"
POLL_SECONDS = 0.1
STOP_SECONDS = 15.0
# Nothing of ours goes through Ray's object store; this is the least it takes.
OBJECT_STORE_BYTES = 80 * 2**20

Progress = Callable[[list[Member]], None]


class Cluster:
    """One router, and as many workers of each role as the configuration says."""

    def __init__(self, config: Config, ray_address: str = "") -> None:
        self._config = config
        self._ray_address = ray_address
        self._actors: list[Any] = []

    def start(self, on_progress: Progress = lambda members: None, timeout: float = 600.0) -> Member:
        """Starts everything; the router's entry, once it is ready."""
        self._join_ray()
        gpus = self._gpus_per_worker()
        controller = ray.remote(Controller)
        self._controller = controller.options(name=CONTROLLER, num_cpus=0).remote(
            self._host("127.0.0.1")
        )
        address = ray.get(self._controller.serve.remote(), timeout=timeout)
        for member in self._plan():
            self._actors.append(self._make_worker(member, gpus))
        self._actors.append(self._make_router(address))
        return self._wait(on_progress, time.monotonic() + timeout)

    def members(self) -> list[Member]:
        found: list[Member] = ray.get(self._controller.members.remote())
        return found

    def stop(self) -> None:
        """Leaves no process of this cluster behind."""
        if not ray.is_initialized():
            return
        stops = [actor.stop.remote() for actor in self._actors]
        ray.wait(stops, num_returns=len(stops), timeout=STOP_SECONDS)
        for actor in self._actors:
            ray.kill(actor)
        ray.shutdown()

    def _join_ray(self) -> None:
        if self._ray_address:
            try:
                ray.init(self._ray_address, namespace=NAMESPACE, log_to_driver=False)
            except ConnectionError as error:
                raise Unavailable(f"no Ray cluster answers at {self._ray_address}") from error
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # A Ray of our own has token authentication on, which it would announce.
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
        ray.init(
            "local",
            namespace=NAMESPACE,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=OBJECT_STORE_BYTES,
        )

    def _gpus_per_worker(self) -> float:
        """One GPU a worker, or an equal share where there are fewer GPUs than workers."""
        total = float(ray.cluster_resources().get("GPU", 0))
        if self._config.device == "cuda" and not total:
            raise InvalidConfig("device is cuda, but Ray sees no GPU", field="device")
        if self._config.device == "cpu":
            return 0.0
        workers = self._config.prefill.workers + self._config.decode.workers
        return min(1.0, total / workers)

    def _host(self, local: str) -> str:
        """Where a process listens: `local` on a Ray of our own, this node's address on a joined
        one, whose workers may be anywhere."""
        return str(ray.util.get_node_ip_address()) if self._ray_address else local

    def _plan(self) -> Iterator[Member]:
        config = self._config
        for role, section in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
            for index in range(section.workers):
                host = "" if self._ray_address else section.host
                yield Member(f"{role.value}-{index}", role, host)

    def _make_worker(self, member: Member, gpus: float) -> Any:
        section = self._config.prefill if member.role is Role.PREFILL else self._config.decode
        actor = ray.remote(WorkerActor).options(
            name=member.worker_id,
            num_cpus=0,
            num_gpus=gpus if section.gpus is None else section.gpus,
            # A worker that dies starts again, for ever, and rejoins.
            max_restarts=-1,
            scheduling_strategy="SPREAD",
        )
        return actor.remote(configs.dump(self._config), member)

    def _make_router(self, controller_address: str) -> Any:
        member = Member(ROUTER, None, self._config.router.host)
        actor = ray.remote(RouterActor).options(name=ROUTER, num_cpus=0, max_restarts=-1)
        tree = configs.dump(self._config)
        return actor.remote(tree, member, controller_address)

    def _wait(self, on_progress: Progress, deadline: float) -> Member:
        while time.monotonic() < deadline:
            members = self.members()
            on_progress(members)
            for member in members:
                if member.error:
                    raise InvalidConfig(f"{member.worker_id} cannot start: {member.error}")
                if member.worker_id == ROUTER and member.address:
                    return member
            time.sleep(POLL_SECONDS)
        raise DeadlineExceeded("the cluster was not ready in time")

"""Starts and stops a cluster on Ray.

start()  joins or starts Ray, makes the actors or takes over those that a cluster of this name
         has already, returns when requests can be served
stop()   lets requests come to their end, ends every actor in order and, where it was started
         here, Ray itself; waits for no request once `hurry` is set
leave()  leaves a detached cluster to itself; cluster/stopping.py ends it

Each cluster has a Ray namespace of its own: any number of them can live on one
Ray, as long as their routers listen on different ports. On a Ray that was
joined, the workers may be anywhere; routers and the controller are on the node
where the cluster was started, or on Ray's head, wherever that is, if it was that.

The routers belong to this process, unless the cluster is detached. Should this
process be killed, Ray ends them, and the controller, which misses the first,
ends everything else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from baton.cluster import store
from baton.cluster.actors import RouterActor
from baton.cluster.controller import Controller
from baton.cluster.fleet import Fleet
from baton.cluster.joining import PREFIX, join, start
from baton.cluster.member import CONTROLLER, ROUTER, Member, router_name
from baton.cluster.preflight import check_ports, free_port, numbered, take_port
from baton.cluster.stopping import stop_everything
from baton.cluster.worker_actors import CONCURRENCY, WorkerActors, find, gpus_of_ray, gpus_per_rank
from baton.core import config as configs
from baton.core.config import Config, RouterConfig
from baton.core.errors import DeadlineExceeded, InvalidConfig, Unavailable
from baton.planner.sizing import Pools
from baton.worker import resources

POLL_SECONDS = 0.1
MEMBERS_SECONDS = 5.0
STOP_SECONDS = 15.0
HEAD = "node:__internal_head__"
"""What only Ray's head has of, as a resource."""

Progress = Callable[[list[Member]], None]

_JUST_STARTED = "{} is just being started by another command: it can be joined in some seconds"


class Cluster:
    """Routers, and at first as many workers of each role as the configuration says."""

    def __init__(
        self, config: Config, ray_address: str = "", *, detached: bool = False, name: str = ""
    ) -> None:
        """`detached` is for a Ray that is joined: the cluster then outlives this process, and one
        of the same `name` that runs already is taken over. No name is a new one."""
        self.name = f"{PREFIX}{name or secrets.token_hex(4)}"
        self._config = _with_whole_paths(config)
        self._ray_address = ray_address
        self._detached = detached
        self._controller: Any = None
        # Kept: one that is not detached would end with its last handle.
        self._routers: list[Any] = []
        self._pids: dict[str, int] = {}
        self._services = contextlib.ExitStack()
        self.log_folder = ""
        # Whether the cluster was there before, and then whether it was started with the same
        # configuration, which it keeps.
        self.taken_over = False
        self.as_configured = True

    def start(self, on_progress: Progress = lambda members: None, timeout: float = 600.0) -> Member:
        """Starts everything; the first router's entry, once all are ready.

        What `on_progress` raises ends the start. `stop` is then still to be called, as it is
        after any other error.
        """
        on_progress([])
        self._join_ray()
        on_progress([])
        self._controller = find(CONTROLLER)
        self.taken_over = self._controller is not None
        if self.taken_over:
            self._take_over()
        else:
            self._make_everything()
        return self._wait(on_progress, time.monotonic() + timeout)

    def _make_everything(self) -> None:
        check_ports(self._config.router)
        gpus = gpus_per_rank(self._config, gpus_of_ray(), joined=bool(self._ray_address))
        fleet = Fleet.of(Pools(self._config.prefill.workers, self._config.decode.workers))
        store.save(fleet)
        address = self._make_controller(gpus)
        # The controller would make them too, but only once its process is there.
        actors = WorkerActors(self._config, gpus, joined=bool(self._ray_address))
        for name, role in fleet.workers.items():
            actors.make(name, role)
        for index in range(self._config.router.count):
            self._routers.append(self._make_router(index, address))

    def _take_over(self) -> None:
        """Leaves all that is there as it is: the workers are the controller's to mend. Only routers
        may be missing, if whoever began to start this cluster was killed."""
        start = store.load_start()
        if start is None:
            raise Unavailable(_JUST_STARTED.format(self.name))
        self.as_configured = _is_config(start.tree, self._config)
        for index in range(self._config.router.count):
            there = find(router_name(index))
            self._routers.append(there or self._make_router(index, start.controller))

    @property
    def is_gone(self) -> bool:
        """Whether somebody has stopped the cluster."""
        return find(CONTROLLER) is None

    def members(self) -> list[Member]:
        """Every process as far as it has come; empty while the controller cannot answer."""
        try:
            found: list[Member] = ray.get(
                self._controller.members.remote(), timeout=MEMBERS_SECONDS
            )
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return []
        return found

    def stop(self, hurry: threading.Event | None = None) -> None:
        """Leaves no process of this cluster behind, but for one that was taken over."""
        with self._services:
            if ray.is_initialized() and self.taken_over:
                self.leave()
            elif ray.is_initialized():
                seconds = self._config.drain_seconds + STOP_SECONDS
                stop_everything(seconds, hurry or threading.Event())

    def leave(self) -> None:
        """Leaves a detached cluster to itself; `stop` then does nothing."""
        ray.shutdown()

    def _join_ray(self) -> None:
        if self._ray_address:
            self.log_folder = join(self._ray_address, self.name)
        else:
            os.environ.update(self._share_gpus())
            workers = self._config.prefill.workers + self._config.decode.workers
            self.log_folder = start(self.name, processes=workers + 2)

    def _share_gpus(self) -> dict[str, str]:
        """What processes need in their environment to run on one GPU side by side."""
        if self._config.prefill.gpu_share == 1 or self._config.device == "cpu":
            return {}
        folder = self._services.enter_context(tempfile.TemporaryDirectory())
        return self._services.enter_context(resources.mps_service(Path(folder)))

    def _make_controller(self, gpus: float) -> str:
        """The controller's address, for those on its node; its port is the same after a restart."""
        host = _this_node()["NodeManagerAddress"] if self._ray_address else "127.0.0.1"
        port = self._config.controller.port or free_port(host)
        take_port(host, port, "controller.port").close()
        address = f":{port}" if self._ray_address else f"{host}:{port}"
        actor = ray.remote(Controller).options(**_here(CONTROLLER), lifetime="detached")
        tree = configs.dump(self._config)
        try:
            self._controller = actor.remote(
                address,
                tree,
                gpus,
                joined=bool(self._ray_address),
                tether="" if self._detached else ROUTER,
            )
        except ray.exceptions.ActorAlreadyExistsError:
            self.taken_over = True  # theirs, and not ours to stop
            raise Unavailable(_JUST_STARTED.format(self.name)) from None
        store.save_start(store.Start(tree, address))
        return address

    def _make_router(self, index: int, controller_address: str) -> Any:
        # Ports are chosen here, once: a router that starts again must be where it was.
        router = _with_ports(numbered(self._config.router, index))
        member = Member(router_name(index), None, router.host)
        actor = ray.remote(RouterActor).options(
            **_here(member.worker_id),
            max_concurrency=CONCURRENCY,
            lifetime="detached" if self._detached else "non_detached",
        )
        tree = configs.dump(dataclasses.replace(self._config, router=router))
        return actor.remote(tree, member, controller_address)

    def _wait(self, on_progress: Progress, deadline: float) -> Member:
        while time.monotonic() < deadline:
            members = self.members()
            on_progress(members)
            for member in members if not self.taken_over else ():
                self._check_start(member)
            ready = {item.worker_id: item for item in members if not item.role and item.address}
            if len(ready) == len(self._routers):
                return ready[ROUTER]
            time.sleep(POLL_SECONDS)
        raise DeadlineExceeded("the cluster was not ready in time")

    def _check_start(self, member: Member) -> None:
        """While a cluster starts, what would later be mended is told instead."""
        if member.error:
            raise InvalidConfig(f"{member.worker_id} cannot start: {member.error}")
        if member.pid and self._pids.setdefault(member.worker_id, member.pid) != member.pid:
            raise Unavailable(
                f"{member.worker_id} was killed while it started; is there enough memory?"
                f" Logs are in {self.log_folder}"
            )


def _is_config(tree: dict[str, object], config: Config) -> bool:
    try:
        return configs.parse(tree) == config
    except InvalidConfig:  # another version's
        return False


def _with_ports(router: RouterConfig) -> RouterConfig:
    return dataclasses.replace(
        router,
        port=router.port or free_port(router.host),
        http_port=router.http_port or free_port(router.host),
        metrics_port=router.metrics_port or free_port(router.host),
    )


def _with_whole_paths(config: Config) -> Config:
    """Of files that processes read which may be started elsewhere."""
    keys, folder = config.router.keys, config.tls.folder
    return dataclasses.replace(
        config,
        router=dataclasses.replace(config.router, keys=keys and str(Path(keys).resolve())),
        tls=dataclasses.replace(config.tls, folder=folder and str(Path(folder).resolve())),
    )


def _here(name: str) -> dict[str, Any]:
    """Options of an actor that lives on this node, and starts again when it dies."""
    node = _this_node()
    # A head that is started again may have another address; any other node is known by it.
    mark = HEAD if HEAD in node["Resources"] else f"node:{node['NodeManagerAddress']}"
    return {
        "name": name,
        "num_cpus": 0,
        "max_restarts": -1,
        # A little of what only this node has, also once it was started again.
        "resources": {mark: 0.001},
    }


def _this_node() -> dict[str, Any]:
    identity = ray.get_runtime_context().get_node_id()
    node: dict[str, Any]
    (node,) = [node for node in ray.nodes() if node["NodeID"] == identity]
    return node

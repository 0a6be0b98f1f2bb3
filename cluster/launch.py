"""Starts and stops a cluster on Ray.

start()  joins or starts Ray, makes the actors or takes over a running cluster of this name, and
         returns when requests can be served
stop()   finishes requests, ends every actor in order and, if it was started here, Ray; once
         `stop_now` is set, requests are not waited for
kill()   ends what is left on a Ray started here, if Ray ended first or `stop` takes too long
leave()  leaves a detached cluster running; cluster/stopping.py ends it

Each cluster has its own Ray namespace: any number of them can share one Ray, if their routers
listen on different ports. On a joined Ray the workers may be on any node; routers and controller
stay on the node where the cluster was started. If that was Ray's head, they follow the head.

The routers belong to this process, unless the cluster is detached. If this process is killed, Ray
ends the routers; the controller notices that the first is gone and ends everything else.
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

from baton.cluster import own_ray, ray_session
from baton.cluster.actors import CONCURRENCY, RouterActor, WorkerActors
from baton.cluster.controller import Controller
from baton.cluster.fleet import CONTROLLER, ROUTER, Fleet, Member, router_name
from baton.cluster.gpu_shares import gpus_per_rank
from baton.cluster.ports import check_ports, free_port, offset_ports, take_port
from baton.cluster.preflight import with_absolute_paths
from baton.cluster.ray_session import PREFIX, StartRecord, find_actor
from baton.cluster.stopping import ANSWER_SECONDS, stop_cluster
from baton.core import config as configs
from baton.core import model_store
from baton.core.config import Config, RouterConfig, served_configs
from baton.core.errors import DeadlineExceeded, InvalidConfig, Unavailable
from baton.planner.sizing import Pools
from baton.worker import resources

POLL_SECONDS = 0.1
MEMBERS_SECONDS = 5.0
STOP_SECONDS = 15.0
RAY_STOP_SECONDS = 20.0
HEAD = "node:__internal_head__"
"""A resource that only Ray's head has."""

Progress = Callable[[list[Member]], None]

_KILLED = (
    "ended while the cluster started; is there enough memory? Ray kills processes when 95% of a"
    " node's memory is in use"
)
_JUST_STARTED = "{} is being started by another command: try again in some seconds"


class Cluster:
    def __init__(
        self, config: Config, ray_address: str = "", *, detached: bool = False, name: str = ""
    ) -> None:
        """A `detached` cluster, on a joined Ray, outlives this process; a running one of the same
        `name` is taken over. Without a name, a random one is chosen."""
        self.name = f"{PREFIX}{name or secrets.token_hex(4)}"
        self._config = with_absolute_paths(config)
        self._ray_address = ray_address
        self._detached = detached
        self._controller: Any = None
        # Handles are kept: an actor that is not detached ends with its last one.
        self._routers: list[Any] = []
        self._services = contextlib.ExitStack()
        self.log_folder = ""
        self.taken_over = False  # the cluster was started by another command
        self.as_configured = True  # a cluster that was taken over has the same configuration

    def start(
        self, on_progress: Progress = lambda members: None, timeout: float = 600.0
    ) -> list[Member]:
        """Starts everything. Returns all processes once every router is ready; raises
        DeadlineExceeded after `timeout` seconds without progress.

        Errors of `on_progress` end the start. Call `stop` after any error.
        """
        on_progress([])
        self._join_ray()
        on_progress([])
        self._controller = find_actor(CONTROLLER)
        self.taken_over = self._controller is not None
        if self.taken_over:
            self._take_over()
        else:
            self._make_everything()
        return self._wait(on_progress, timeout)

    def _make_everything(self) -> None:
        check_ports(self._config.router)
        total = float(ray.cluster_resources().get("GPU", 0))
        joined = bool(self._ray_address)
        models = {model_store.model_name(each): each for each in served_configs(self._config)}
        gpus = gpus_per_rank(list(models.values()), total, joined=joined)
        fleet = Fleet({})
        for model, config in models.items():
            fleet = fleet.scaled(_pools(config), model=model)
        ray_session.save_fleet(fleet)
        address = self._make_controller(gpus)
        # The controller would make them too, but not before its process runs.
        for name, role in fleet.workers.items():
            WorkerActors(models[fleet.models[name]], gpus, joined=joined).make(name, role)
        for index in range(self._config.router.count):
            self._routers.append(self._make_router(index, address))

    def _take_over(self) -> None:
        """Makes missing routers: the command that started the cluster may have been killed. The
        controller restores the workers."""
        start = ray_session.load_start()
        if start is None:
            raise Unavailable(_JUST_STARTED.format(self.name))
        self.as_configured = _is_config(start.tree, self._config)
        for index in range(self._config.router.count):
            there = find_actor(router_name(index))
            self._routers.append(there or self._make_router(index, start.controller))

    @property
    def is_gone(self) -> bool:
        """True once the cluster has been stopped."""
        return find_actor(CONTROLLER) is None

    def members(self) -> list[Member]:
        """Returns every process and its progress; nothing while the controller does not answer."""
        try:
            return self._ask_members()
        except ray.exceptions.RayActorError:
            return []

    def _ask_members(self) -> list[Member]:
        """Raises ActorDiedError if the controller cannot start."""
        asked = self._controller.members.remote()
        try:
            found: list[Member] = ray.get(asked, timeout=MEMBERS_SECONDS)
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
            return []
        return found

    def stop(self, stop_now: threading.Event | None = None) -> None:
        """Ends every process of the cluster, or leaves it running if it was taken over."""
        with self._services:
            if ray.is_initialized() and self.taken_over:
                self.leave()
            elif ray.is_initialized():
                self._stop(stop_now or threading.Event())

    def _stop(self, stop_now: threading.Event) -> None:
        try:
            stop_cluster(self._config.drain_seconds + STOP_SECONDS, stop_now)
        except Unavailable:
            if self._ray_address:
                raise
            # A Ray that was started here has ended, and what it left is killed.

    @property
    def stop_seconds(self) -> float:
        """The longest that `stop` takes, unless it hangs."""
        pool_seconds = self._config.drain_seconds + STOP_SECONDS + ANSWER_SECONDS
        return 2 * pool_seconds + RAY_STOP_SECONDS  # routers, then workers, then Ray

    @property
    def has_lost_ray(self) -> bool:
        """True if the Ray that was started here has ended; also after `stop`. A start that fails
        raises its own error."""
        return bool(self.log_folder) and own_ray.has_ended()

    def kill(self) -> None:
        """Kills every process of a Ray that was started here. On a joined Ray, they stay."""
        self._services.close()

    def leave(self) -> None:
        """Leaves a detached cluster running; `stop` then does nothing."""
        ray.shutdown()

    def _join_ray(self) -> None:
        if self._ray_address:
            self.log_folder = ray_session.join(self._ray_address, self.name)
        else:
            os.environ.update(self._share_gpus())
            self._services.callback(own_ray.kill_all)
            workers = sum(_pools(each).total for each in served_configs(self._config))
            self.log_folder = ray_session.start(self.name, processes=workers + 2)

    def _share_gpus(self) -> dict[str, str]:
        """Starts NVIDIA MPS if processes share a GPU; returns the environment for it."""
        models = served_configs(self._config)
        if all(each.prefill.gpu_share == 1 or each.device == "cpu" for each in models):
            return {}
        folder = self._services.enter_context(tempfile.TemporaryDirectory())
        return self._services.enter_context(resources.mps_service(Path(folder)))

    def _make_controller(self, gpus: float) -> str:
        """Returns the controller's address on its node. A restart keeps the port."""
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
            self.taken_over = True  # so that `stop` does not end it
            raise Unavailable(_JUST_STARTED.format(self.name)) from None
        ray_session.save_start(StartRecord(tree, address))
        return address

    def _make_router(self, index: int, controller_address: str) -> Any:
        # Ports are chosen once: a restarted router must keep its address.
        router = _with_ports(offset_ports(self._config.router, index))
        member = Member(router_name(index), None, router.host)
        actor = ray.remote(RouterActor).options(
            **_here(member.worker_id),
            max_concurrency=CONCURRENCY,
            lifetime="detached" if self._detached else "non_detached",
        )
        tree = configs.dump(dataclasses.replace(self._config, router=router))
        return actor.remote(tree, member, controller_address)

    def _wait(self, on_progress: Progress, timeout: float) -> list[Member]:
        seen: set[tuple[str, str]] = set()
        deadline = time.monotonic() + timeout
        while True:
            members = self.members() if self.taken_over else self._checked_members()
            on_progress(members)
            if new := {(each.worker_id, each.progress) for each in members} - seen:
                seen |= new
                deadline = time.monotonic() + timeout
            if len(routers(members)) == len(self._routers):
                return members
            if time.monotonic() >= deadline:
                raise DeadlineExceeded("the cluster was not ready in time")
            time.sleep(POLL_SECONDS)

    def _checked_members(self) -> list[Member]:
        """Returns the members; raises the first error that a process reports or ended with."""
        # Read before the members: a member's own error says more than its end.
        ended = ray_session.restarted_actors()
        try:
            members = self._ask_members()
        except ray.exceptions.ActorDiedError as error:
            reason = str(error).strip().splitlines()[-1]
            raise Unavailable(f"the controller cannot start: {reason}{self.logs}") from error
        for member in members:
            if member.error:
                raise InvalidConfig(f"{member.worker_id} cannot start: {member.error}")
        if ended:
            names = " and ".join(ended)
            raise Unavailable(f"{names} {_KILLED}{self.logs}")
        return members

    @property
    def logs(self) -> str:
        """For the end of a message."""
        return f"; logs are in {self.log_folder}" if self.log_folder else ""


def _pools(config: Config) -> Pools:
    return Pools(config.prefill.workers, config.decode.workers)


def routers(members: list[Member]) -> list[Member]:
    """Returns the ready routers, by name."""
    ready = [member for member in members if not member.role and member.address]
    return sorted(ready, key=lambda member: member.worker_id)


def _is_config(tree: dict[str, object], config: Config) -> bool:
    try:
        return configs.parse(tree) == config
    except InvalidConfig:  # written by another version
        return False


def _with_ports(router: RouterConfig) -> RouterConfig:
    return dataclasses.replace(
        router,
        port=router.port or free_port(router.host),
        http_port=router.http_port or free_port(router.host),
        metrics_port=router.metrics_port or free_port(router.host),
    )


def _here(name: str) -> dict[str, Any]:
    """Returns options of an actor that Ray restarts on this node."""
    node = _this_node()
    # A restarted head may have another address; another node keeps its own.
    resource = HEAD if HEAD in node["Resources"] else f"node:{node['NodeManagerAddress']}"
    return {
        "name": name,
        "num_cpus": 0,
        "max_restarts": -1,
        # Only this node has the resource, also after a restart.
        "resources": {resource: 0.001},
    }


def _this_node() -> dict[str, Any]:
    identity = ray.get_runtime_context().get_node_id()
    node: dict[str, Any]
    (node,) = [node for node in ray.nodes() if node["NodeID"] == identity]
    return node

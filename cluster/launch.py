"""Starts and stops a cluster on Ray.

start()  joins or starts Ray, makes the actors, returns when requests can be served
stop()   lets requests come to their end, ends every actor in order and, where it was started
         here, Ray itself; waits for no request once `hurry` is set

Each run has a Ray namespace of its own: any number of clusters can live on one
Ray, as long as their routers listen on different ports. On a Ray that was
joined, the workers may be anywhere; the router and the controller are on the
node where the cluster was started. Workers come and go with the pools, which
the controller owns, so what there is to stop is found by asking Ray.

The router belongs to this process. Should this process be killed, Ray ends the
router, and the controller, which misses it, ends everything else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from cluster import store
from cluster.actors import RouterActor
from cluster.controller import Controller
from cluster.fleet import Fleet
from cluster.member import CONTROLLER, ROUTER, Member, is_router, is_worker
from cluster.preflight import check_ray, free_port, numbered
from cluster.worker_actors import CONCURRENCY, WorkerActors, find, gpus_per_worker, kill
from core import config as configs
from core.config import Config, RouterConfig
from core.errors import DeadlineExceeded, InvalidConfig, Unavailable
from planner.pools import Pools
from worker import mps

POLL_SECONDS = 0.1
MEMBERS_SECONDS = 5.0
STOP_SECONDS = 15.0
# For a process to say that it is there, when it is to be stopped.
ANSWER_SECONDS = 5.0
# Nothing of ours goes through Ray's object store; this is the least it takes.
OBJECT_STORE_BYTES = 80 * 2**20

Progress = Callable[[list[Member]], None]


class Cluster:
    """Routers, and at first as many workers of each role as the configuration says."""

    def __init__(self, config: Config, ray_address: str = "") -> None:
        self._config = _with_whole_paths(config)
        self._ray_address = ray_address
        self._controller: Any = None
        self._routers: list[Any] = []  # kept: with its last handle an actor would end
        self._pids: dict[str, int] = {}
        self._services = contextlib.ExitStack()
        self.log_folder = ""

    def start(self, on_progress: Progress = lambda members: None, timeout: float = 600.0) -> Member:
        """Starts everything; the first router's entry, once all are ready.

        What `on_progress` raises ends the start. `stop` is then still to be called, as it is
        after any other error.
        """
        on_progress([])
        self._join_ray()
        on_progress([])
        gpus = gpus_per_worker(self._config)
        fleet = Fleet.of(Pools(self._config.prefill.workers, self._config.decode.workers))
        store.save(fleet)
        address = self._make_controller(gpus)
        # The controller would make them too, but only once its process is there.
        actors = WorkerActors(self._config, gpus, joined=bool(self._ray_address))
        for name, role in fleet.workers.items():
            actors.make(name, role)
        for index in range(self._config.router.count):
            self._routers.append(self._make_router(index, address))
        return self._wait(on_progress, time.monotonic() + timeout)

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
        """Leaves no process of this cluster behind."""
        with self._services:
            if ray.is_initialized():
                self._stop_processes(hurry or threading.Event())

    def _stop_processes(self, hurry: threading.Event) -> None:
        # It would start again what ends.
        kill(CONTROLLER)
        names = ray.util.list_named_actors()
        # Routers first: their requests need the workers.
        self._stop_actors([name for name in names if is_router(name)], hurry)
        self._stop_actors([name for name in names if is_worker(name)], hurry)
        # With those that have no process yet.
        for name in ray.util.list_named_actors():
            kill(name)
        store.forget()
        ray.shutdown()

    def _stop_actors(self, names: list[str], hurry: threading.Event) -> None:
        actors = _running(names)
        stops = [actor.stop.remote() for actor in actors]
        deadline = time.monotonic() + self._config.drain_seconds + STOP_SECONDS
        hurried = False
        while stops and time.monotonic() < deadline:
            if hurry.is_set() and not hurried:
                hurried = True
                for actor in actors:
                    actor.hurry.remote()
            _, stops = ray.wait(stops, num_returns=len(stops), timeout=POLL_SECONDS)

    def _join_ray(self) -> None:
        # Ray would announce what is no news here: that it authenticates its processes, and that
        # it leaves the signals to us.
        logging.getLogger("ray").setLevel(logging.ERROR)
        namespace = f"baton-{secrets.token_hex(4)}"
        quiet = {"namespace": namespace, "log_to_driver": False, "configure_logging": False}
        if self._ray_address:
            check_ray(self._ray_address)
            try:
                context = ray.init(self._ray_address, **quiet)
            except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                raise Unavailable(f"cannot join Ray at {self._ray_address}: {error}") from error
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            os.environ.update(self._share_gpus())
            # Ray would let everything else on the machine go before our workers.
            os.environ.setdefault("RAY_worker_niceness", "0")
            context = ray.init(
                "local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                # Our actors ask for none; Ray gets as many processes ready, while it starts.
                num_cpus=self._config.prefill.workers + self._config.decode.workers + 2,
                **quiet,
            )
        self.log_folder = f"{context.address_info['session_dir']}/logs"

    def _share_gpus(self) -> dict[str, str]:
        """What processes need in their environment to run on one GPU side by side."""
        if self._config.prefill.gpu_share == 1 or self._config.device == "cpu":
            return {}
        folder = self._services.enter_context(tempfile.TemporaryDirectory())
        return self._services.enter_context(mps.service(Path(folder)))

    def _make_controller(self, gpus: float) -> str:
        """The controller's address: chosen here, so that it is the same after a restart."""
        host = str(ray.util.get_node_ip_address()) if self._ray_address else "127.0.0.1"
        address = f"{host}:{self._config.controller.port or free_port(host)}"
        actor = ray.remote(Controller).options(**_here(CONTROLLER), lifetime="detached")
        self._controller = actor.remote(
            address, configs.dump(self._config), gpus, joined=bool(self._ray_address), tether=ROUTER
        )
        return address

    def _make_router(self, index: int, controller_address: str) -> Any:
        # Ports are chosen here, once: a router that starts again must be where it was.
        router = _with_ports(numbered(self._config.router, index))
        member = Member(f"router-{index}", None, router.host)
        options = _here(member.worker_id)
        actor = ray.remote(RouterActor).options(**options, max_concurrency=CONCURRENCY)
        tree = configs.dump(dataclasses.replace(self._config, router=router))
        return actor.remote(tree, member, controller_address)

    def _wait(self, on_progress: Progress, deadline: float) -> Member:
        while time.monotonic() < deadline:
            members = self.members()
            on_progress(members)
            for member in members:
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
        if self._pids.setdefault(member.worker_id, member.pid) != member.pid:
            raise Unavailable(
                f"{member.worker_id} was killed while it started; is there enough memory?"
                f" Logs are in {self.log_folder}"
            )


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


def _running(names: list[str]) -> list[Any]:
    """The actors that have a process, which Ray may still look for a place for."""
    actors = [actor for actor in map(find, names) if actor]
    answers = {actor.__ray_ready__.remote(): actor for actor in actors}
    if not answers:
        return []
    given, _ = ray.wait(list(answers), num_returns=len(answers), timeout=ANSWER_SECONDS)
    return [answers[answer] for answer in given]


def _here(name: str) -> dict[str, Any]:
    """Options of an actor that lives at this node's address, and starts again when it dies."""
    identity = ray.get_runtime_context().get_node_id()
    (node,) = [node for node in ray.nodes() if node["NodeID"] == identity]
    return {
        "name": name,
        "num_cpus": 0,
        "max_restarts": -1,
        # A little of what only a node at this address has, also one that was started again.
        "resources": {f"node:{node['NodeManagerAddress']}": 0.001},
    }

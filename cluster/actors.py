"""The Ray actors: each is one process that runs one of our servers, in a thread.

    constructor ─▶ starting ─▶ serving ─stop() or drained─▶ ended
                       │         │
                       │         └─drained, to restart─┐
                       └─────────┴─error─▶ failed ─────┴▶ the process ends ─Ray─▶ constructor

The constructor starts a thread with the server's event loop. Ray restarts a dead actor by calling
its constructor again; the new process reports its new address to the controller.

An actor has no coroutines, the thread has: of a class with any, Ray runs all methods on one event
loop, where `stop` would hold up `hurry`, and the constructor in a thread that cannot handle
signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING

import ray
import uvloop

from baton.cluster.fleet import CONTROLLER, DRAINED, DRAINING, Member
from baton.cluster.preflight import describe_wait, gpus_of, within_share
from baton.cluster.ray_session import cluster_name, complete, find_actor, load_fleet
from baton.core import config as configs
from baton.core.config import Config
from baton.core.errors import BatonError
from baton.core.process import StartTimes, StopSignal, no_collections, settle_memory
from baton.core.types import Role
from baton.worker.resources import claim_threads
from baton.worker.step_record import open_record

if TYPE_CHECKING:
    from baton.router.server import RouterServer
    from baton.worker.worker_server import WorkerServer

log = logging.getLogger(__name__)

CONCURRENCY = 2
"""Concurrent calls to one actor: `hurry` comes while `stop` runs."""

STOP_SECONDS = 10.0
"""Added to the time that requests have to finish."""

REPORT_SECONDS = 1.0

RETRY_SECONDS = 1.0
"""Before a process ends that Ray restarts: time to report, and no hurry to fail again."""


class ServerThread:
    """Runs `_serve` on its own event loop; the process ends if that fails."""

    def __init__(self, tree: dict[str, object], member: Member) -> None:
        self._config = configs.parse(tree)
        self._member = dataclasses.replace(member, pid=os.getpid())
        # By name: a handle among the arguments may be stale after a restart.
        self._controller = ray.get_actor(CONTROLLER)
        self._loop = uvloop.new_event_loop()
        self._stopping = StopSignal()
        self.serving = False
        logging.basicConfig(level=self._config.log_level.upper())
        self._thread = threading.Thread(target=self._run, name=member.worker_id, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finishes requests within drain_seconds, and ends the server; returns when it has
        released everything. One that does not serve yet holds nothing, and may be killed."""
        if self.serving:
            self._loop.call_soon_threadsafe(self._stopping.requested.set)
            self._thread.join(self._config.drain_seconds + STOP_SECONDS)

    def hurry(self) -> None:
        """Ends a stopping server without waiting for requests."""
        self._loop.call_soon_threadsafe(self._stopping.immediate.set)

    def _run(self) -> None:
        try:
            restart = self._loop.run_until_complete(self._live())
        except BaseException as error:
            log.exception("this process failed and ends")
            self._report(progress="failed", address="", error=_reason(error))
            restart = True
        if restart:
            time.sleep(RETRY_SECONDS)
            os._exit(1)

    async def _live(self) -> bool:
        reporting = asyncio.ensure_future(self._keep_reporting())
        try:
            return await self._serve()
        finally:
            reporting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reporting

    async def _keep_reporting(self) -> None:
        """For a restarted controller, which knows no member."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._report()

    def _report(self, **changes: str | Role) -> None:
        """Reports this process to the controller, without waiting for it."""
        self._member = dataclasses.replace(self._member, **changes)  # type: ignore[arg-type]
        self._controller.update.remote(self._member)

    async def _serve(self) -> bool:
        """Serves to the end. Returns whether a fresh process replaces this one."""
        raise NotImplementedError


def sized_for(config: Config, role: Role, made_for: Role) -> Config:
    """`config` with as many ranks for `role` as for `made_for`, whose GPUs the worker has."""
    ranks = config.pool(made_for).tensor_parallel
    pool = dataclasses.replace(config.pool(role), tensor_parallel=ranks)
    return dataclasses.replace(config, **{role.value: pool})  # type: ignore[arg-type]


class WorkerThread(ServerThread):
    """One worker of either role."""

    def __init__(self, tree: dict[str, object], member: Member) -> None:
        self._server: WorkerServer | None = None
        # Before torch is imported: requests may wait for the verdict on the process before.
        self._record = open_record(cluster_name())
        # The role it was made for, or has switched to before a restart.
        assert member.role is not None
        role = load_fleet().workers.get(member.worker_id, member.role)
        config = sized_for(configs.parse(tree), role, member.role)
        node = ray.get_runtime_context().get_node_id()
        super().__init__(configs.dump(config), dataclasses.replace(member, role=role, node=node))

    def stop(self) -> None:
        if not self.serving:
            self._record.close()
        super().stop()

    def drain(self) -> None:
        """Takes nothing new, finishes what runs, and ends for good."""
        self._loop.call_soon_threadsafe(self._begin_draining)

    def restart(self) -> None:
        """Takes nothing new, finishes or hands back what runs, and restarts as a fresh process,
        on a node that Ray chooses."""
        if self._server is not None:
            self._loop.call_soon_threadsafe(self._server.drain, True)

    def switch_role(self, role: Role) -> None:
        """Switches the role once what runs is finished or handed back."""
        if self._server is not None:
            self._loop.call_soon_threadsafe(self._server.switch, role)

    def _begin_draining(self) -> None:
        if self._server and self._member.progress not in (DRAINING, DRAINED):
            self._server.drain()

    def _report(self, **changes: str | Role) -> None:
        self._record.judge_others()
        self._member = dataclasses.replace(
            self._member,
            requests=self._server.requests if self._server else 0,
            incarnation=self._record.incarnation,
            verdicts=tuple(self._record.verdicts),
        )
        super()._report(**changes)

    async def _serve(self) -> bool:
        times = StartTimes()
        self._report(progress="importing torch")
        assert self._member.role is not None
        claim_threads(self._config, self._member.role)
        # Imported after the first report: torch takes seconds.
        with no_collections():
            from baton.worker.worker_server import WorkerServer

        server = WorkerServer(
            self._config,
            self._member.role,
            self._member.worker_id,
            progress=lambda text: self._report(progress=text),
            on_role=lambda role: self._report(role=role),
            on_leaving=lambda: self._report(progress=DRAINING),
            times=times,
            record=self._record,
        )
        host = self._member.host or ray.util.get_node_ip_address()
        await server.start(host, 0, metrics_port=0)
        self._server = server
        self.serving = True
        log.info("started in %s", times)
        self._report(
            progress="ready", address=server.address, agent=server.agent, started=str(times)
        )
        await server.serve_until(self._stopping)
        if self._stopping.requested.is_set():
            return False
        self._report(progress="restarting" if server.restarts else DRAINED, address="", agent="")
        return server.restarts


class RouterThread(ServerThread):
    """One router."""

    def __init__(self, tree: dict[str, object], member: Member, controller_address: str) -> None:
        """The controller is on the same node, which may have another address after a restart."""
        self._controller_address = complete(controller_address)
        super().__init__(tree, member)

    async def _serve(self) -> bool:
        with no_collections():
            from baton.router.server import RouterServer

        self._report(progress="loading the tokenizer")
        server = RouterServer(self._config, self._member.worker_id)
        await server.start(self._controller_address)
        settle_memory()
        self.serving = True
        self._report(progress="waiting for workers")
        waiting = asyncio.ensure_future(self._report_when_ready(server))
        await server.serve_until(self._stopping)
        waiting.cancel()
        return False

    async def _report_when_ready(self, server: RouterServer) -> None:
        await server.wait_ready()
        self._report(
            progress="ready",
            address=server.address,
            http=server.http_address,
            metrics=server.metrics_address,
        )


def _reason(error: BaseException) -> str:
    """One line: for an operator, or for a developer to look further."""
    return error.message if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"


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

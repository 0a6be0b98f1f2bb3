"""The Ray actors: each is one process that runs a worker's or a router's server in a thread.

    constructor ─▶ starting ─▶ serving ─stop() or drained─▶ ended
                       │         │
                       │         └─drained, to restart─┐
                       └─────────┴─error─▶ failed ─────┴▶ the process ends ─Ray─▶ constructor

The constructor starts a thread with the server's event loop. Ray restarts a dead actor by calling
its constructor again; the new process reports its new address to the controller.

The actor classes have no coroutines: if a class has any, Ray runs all its methods on one event
loop, where `stop` would block `stop_now`, and the constructor in a thread that cannot handle
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
from collections.abc import Set
from types import FrameType
from typing import TYPE_CHECKING, Any

import ray
import uvloop

from baton.cluster.fleet import CONTROLLER, DRAINED, DRAINING, Member
from baton.cluster.gpu_shares import describe_wait, gpus_of, within_share
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
"""Concurrent calls to one actor: `stop_now` is called while `stop` runs."""

STOP_SECONDS = 10.0
"""Added to the time that requests have to finish."""

REPORT_SECONDS = 1.0

RETRY_SECONDS = 1.0
"""Delay before a failed process ends: lets its report arrive, and limits the rate of restarts."""


class ServerThread:
    """Runs `_serve` on an event loop in a thread. Ends the process if it fails."""

    def __init__(self, tree: dict[str, object], member: Member) -> None:
        self._config = configs.parse(tree)
        self._member = dataclasses.replace(member, pid=os.getpid())
        # Found by name: after a restart, a handle among the arguments may be stale.
        self._controller = ray.get_actor(CONTROLLER)
        self._loop = uvloop.new_event_loop()
        self._stopping = StopSignal()
        self.serving = False
        logging.basicConfig(level=self._config.log_level.upper())
        self._thread = threading.Thread(target=self._run, name=member.worker_id, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finishes requests within drain_seconds and ends the server. Returns once it has
        released everything. A server that does not serve yet holds nothing, and may be killed."""
        if self.serving:
            self._loop.call_soon_threadsafe(self._stopping.requested.set)
            self._thread.join(self._config.drain_seconds + STOP_SECONDS)

    def stop_now(self) -> None:
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
        """Reports periodically, since a restarted controller knows no member."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._report()

    def _report(self, **changes: str | Role) -> None:
        """Sends the changed member to the controller, without waiting for it."""
        self._member = dataclasses.replace(self._member, **changes)  # type: ignore[arg-type]
        self._controller.update.remote(self._member)

    def restart(self) -> None:
        raise NotImplementedError

    async def _serve(self) -> bool:
        """Serves until stopped or drained. Returns True if Ray is to restart the process."""
        raise NotImplementedError


def sized_for(config: Config, role: Role, made_for: Role) -> Config:
    """Returns `config` with the ranks of `made_for` for `role`: a worker that switches its role
    keeps its GPUs."""
    ranks = config.pool(made_for).tensor_parallel
    pool = dataclasses.replace(config.pool(role), tensor_parallel=ranks)
    return dataclasses.replace(config, **{role.value: pool})  # type: ignore[arg-type]


class WorkerThread(ServerThread):
    def __init__(self, tree: dict[str, object], member: Member) -> None:
        self._server: WorkerServer | None = None
        # Opened before torch is imported: requests may wait for the previous process's verdict.
        self._record = open_record(cluster_name())
        # The fleet has the role that it switched to before a restart.
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
        """Takes no new requests, finishes the running ones, and ends for good."""
        self._loop.call_soon_threadsafe(self._begin_draining)

    def restart(self) -> None:
        """Takes no new requests, finishes or hands back the running ones, and restarts as a fresh
        process on a node that Ray chooses."""
        if self._server is not None:
            self._loop.call_soon_threadsafe(self._server.drain, True)

    def switch_role(self, role: Role) -> None:
        """Switches the role once the running requests are finished or handed back."""
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
    def __init__(self, tree: dict[str, object], member: Member, controller_address: str) -> None:
        # The controller is on the same node, whose address may change with a restart.
        self._controller_address = complete(controller_address)
        self._restarts = False
        super().__init__(tree, member)

    def restart(self) -> None:
        """Takes no new requests, finishes the running ones, and restarts as a fresh process."""
        self._restarts = True
        self._loop.call_soon_threadsafe(self._stopping.requested.set)

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
        return self._restarts

    async def _report_when_ready(self, server: RouterServer) -> None:
        await server.wait_ready()
        self._report(
            progress="ready",
            address=server.address,
            http=server.http_address,
            metrics=server.metrics_address,
        )


def _reason(error: BaseException) -> str:
    """Returns one line for operators; an unexpected error's type is for developers."""
    return error.message if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"


class _ServerActor:
    def __init__(self, thread: ServerThread) -> None:
        self._thread = thread
        self._rays_handler = signal.signal(signal.SIGTERM, self._on_sigterm)

    def stop(self) -> None:
        self._thread.stop()

    def stop_now(self) -> None:
        self._thread.stop_now()

    def restart(self) -> None:
        self._thread.restart()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Drains and restarts; at a second signal, Ray's handler ends the process at once."""
        signal.signal(number, self._rays_handler)
        if self._thread.serving:
            self.restart()
        else:
            signal.raise_signal(number)


class WorkerActor(_ServerActor):
    _thread: WorkerThread

    def __init__(self, tree: dict[str, object], member: Member) -> None:
        super().__init__(WorkerThread(tree, member))

    def drain(self) -> None:
        self._thread.drain()

    def switch_role(self, role: Role) -> None:
        self._thread.switch_role(role)


class RouterActor(_ServerActor):
    def __init__(self, tree: dict[str, object], member: Member, controller_address: str) -> None:
        super().__init__(RouterThread(tree, member, controller_address))


class WorkerActors:
    """Makes a model's worker actors. They are detached, since they outlive the process that made
    them: the command that started the cluster, or an earlier controller. Methods block on Ray's
    head: do not call them on an event loop."""

    def __init__(self, config: Config, gpus: float, *, joined: bool) -> None:
        """`gpus` is the share of one process, unless the configuration gives a number or device
        "cpu". On a joined Ray, workers may be on any node, and listen at its address."""
        self._config = config
        self._gpus = 0.0 if config.device == "cpu" else gpus
        self._joined = joined

    def waits_for(self, role: Role) -> str:
        """Says why a worker of this role has no process yet."""
        pool = self._config.pool(role)
        wanted = {"GPU": gpus_of(self._config, role, self._gpus), **pool.resources}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return describe_wait({name: amount for name, amount in wanted.items() if amount}, nodes)

    def make(self, name: str, role: Role) -> None:
        """Makes a worker that Ray always restarts, unless it exists."""
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


class SilentActors:
    """Calls actors that do not report, one call each at a time.

    Where a process cannot write its log because the disk is full, Ray was seen to skip the
    constructor and to count the actor as alive. Such a process ends at its first call, and Ray
    starts it again. Frozen and starting processes answer later.
    """

    def __init__(self) -> None:
        self._calls: dict[str, Any] = {}

    def call(self, names: Set[str]) -> None:
        """Blocks on Ray's head."""
        pending = {
            name: call
            for name, call in self._calls.items()
            if name in names and not ray.wait([call], timeout=0)[0]
        }
        actors = {name: find_actor(name) for name in names - pending.keys()}
        calls = {name: actor.__ray_ready__.remote() for name, actor in actors.items() if actor}
        self._calls = pending | calls


def drain(name: str) -> None:
    """Drains a worker, which then ends for good."""
    if actor := find_actor(name):
        actor.drain.remote()


def switch_role(name: str, role: Role) -> None:
    if actor := find_actor(name):
        actor.switch_role.remote(role)

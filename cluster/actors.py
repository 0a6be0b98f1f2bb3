"""The Ray actors: each is one process that runs one of our servers.

    constructor ─▶ starting ─▶ serving ─stop() or drained─▶ ended
                       │         │
                       │         └─drained, to restart─┐
                       └─────────┴─error─▶ failed ─────┴▶ the process ends ─Ray─▶ constructor

A server runs on an event loop of its own, in a thread that the constructor
starts. Ray restarts a dead actor by calling its constructor again, and the new
process finds its way back by telling the controller its new address.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

import ray
import uvloop

from baton.cluster import store
from baton.cluster.joining import whole
from baton.cluster.member import CONTROLLER, DRAINED, DRAINING, Member
from baton.core import config as configs
from baton.core.config import Config
from baton.core.errors import BatonError
from baton.core.process import StopSignal, settle_memory
from baton.core.types import Role
from baton.worker.resources import claim_threads

if TYPE_CHECKING:
    from baton.router.server import RouterServer
    from baton.worker.worker_server import WorkerServer

log = logging.getLogger(__name__)

# Beyond the time that requests are given to end.
STOP_SECONDS = 10.0
TELL_SECONDS = 1.0
# Before a process ends that Ray starts again: time to tell, and no hurry to fail again.
RETRY_SECONDS = 1.0


class _ServerActor:
    """Runs `_serve` on an event loop of its own; the process ends if that fails."""

    def __init__(self, tree: dict[str, object], member: Member) -> None:
        self._config = configs.parse(tree)
        self._member = dataclasses.replace(member, pid=os.getpid())
        # By name: a handle among the arguments could not be relied on at a restart.
        self._controller = ray.get_actor(CONTROLLER)
        self._loop = uvloop.new_event_loop()
        self._stopping = StopSignal()
        self._serving = False
        logging.basicConfig(level=self._config.log_level.upper())
        self._thread = threading.Thread(target=self._run, name=member.worker_id, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Lets requests come to their end, for so long, and ends the server in order; returns
        when it has let go of everything.

        One that does not serve yet holds nothing that others could miss: it is left to be killed.
        """
        if self._serving:
            self._loop.call_soon_threadsafe(self._stopping.requested.set)
            self._thread.join(self._config.drain_seconds + STOP_SECONDS)

    def hurry(self) -> None:
        """Has a server that is stopping wait for nothing."""
        self._loop.call_soon_threadsafe(self._stopping.immediate.set)

    def _run(self) -> None:
        try:
            again = self._loop.run_until_complete(self._live())
        except BaseException as error:
            log.exception("this process can no longer be trusted and ends")
            self._tell(progress="failed", address="", error=_reason(error))
            again = True
        if again:
            time.sleep(RETRY_SECONDS)
            os._exit(1)

    async def _live(self) -> bool:
        telling = asyncio.ensure_future(self._keep_telling())
        try:
            return await self._serve()
        finally:
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await telling

    async def _keep_telling(self) -> None:
        """For a controller that was started again, and knows nobody."""
        while True:
            await asyncio.sleep(TELL_SECONDS)
            self._tell()

    def _tell(self, **changes: str | Role) -> None:
        """Tells the controller how far this process is; does not wait for it."""
        requests = self._requests()
        self._member = dataclasses.replace(self._member, requests=requests, **changes)  # type: ignore[arg-type]
        self._controller.update.remote(self._member)

    def _requests(self) -> int:
        return 0

    async def _serve(self) -> bool:
        """Serves to the end; whether a fresh process is to take this one's place."""
        raise NotImplementedError


def sized_for(config: Config, role: Role, made_for: Role) -> Config:
    """`config` with workers of a role of as many processes as one of the role that it was made
    for: it has their GPUs, whatever it does since."""
    size = config.pool(made_for).tensor_parallel
    if role is Role.PREFILL:
        prefill = dataclasses.replace(config.prefill, tensor_parallel=size)
        return dataclasses.replace(config, prefill=prefill)
    decode = dataclasses.replace(config.decode, tensor_parallel=size)
    return dataclasses.replace(config, decode=decode)


class WorkerActor(_ServerActor):
    """One worker of either role."""

    def __init__(self, tree: dict[str, object], member: Member) -> None:
        self._server: WorkerServer | None = None
        # The role that it was made for, or has changed to before it was started again.
        assert member.role is not None
        role = store.load().workers.get(member.worker_id, member.role)
        config = sized_for(configs.parse(tree), role, member.role)
        super().__init__(configs.dump(config), dataclasses.replace(member, role=role))

    def drain(self) -> None:
        """Has the worker take nothing new and, when what runs has ended, leave for good."""
        self._loop.call_soon_threadsafe(self._begin_draining)

    def restart(self) -> None:
        """Has the worker take nothing new, finish or hand back what runs, and start again as a
        fresh process, on a node of Ray's choice."""
        if self._server is not None:
            self._loop.call_soon_threadsafe(self._server.drain, True)

    def switch_role(self, role: Role) -> None:
        """Has the worker go on in another role, once what runs has ended or been handed back."""
        if self._server is not None:
            self._loop.call_soon_threadsafe(self._server.switch, role)

    def _begin_draining(self) -> None:
        if self._server and self._member.progress not in (DRAINING, DRAINED):
            self._server.drain()

    def _requests(self) -> int:
        return self._server.requests if self._server else 0

    async def _serve(self) -> bool:
        self._tell(progress="importing torch")
        assert self._member.role is not None
        claim_threads(self._config, self._member.role)
        # Imported here so that the controller hears from this process before torch is there.
        from baton.worker.worker_server import WorkerServer

        server = WorkerServer(
            self._config,
            self._member.role,
            self._member.worker_id,
            progress=lambda text: self._tell(progress=text),
            on_role=lambda role: self._tell(role=role),
            on_leaving=lambda: self._tell(progress=DRAINING),
        )
        await server.start(self._member.host or ray.util.get_node_ip_address(), 0)
        self._server = server
        self._serving = True
        self._tell(progress="ready", address=server.address, agent=server.agent)
        await server.serve_until(self._stopping)
        if self._stopping.requested.is_set():
            return False
        self._tell(progress="restarting" if server.restarts else DRAINED, address="", agent="")
        return server.restarts


class RouterActor(_ServerActor):
    """One router."""

    def __init__(self, tree: dict[str, object], member: Member, controller_address: str) -> None:
        """The controller is on the same node, which may have another address after a restart."""
        self._controller_address = whole(controller_address)
        super().__init__(tree, member)

    async def _serve(self) -> bool:
        from baton.router.server import RouterServer

        self._tell(progress="loading the tokenizer")
        server = RouterServer(self._config, self._member.worker_id)
        await server.start(self._controller_address)
        settle_memory()
        self._serving = True
        self._tell(progress="waiting for workers")
        waiting = asyncio.ensure_future(self._tell_when_ready(server))
        await server.serve_until(self._stopping)
        waiting.cancel()
        return False

    async def _tell_when_ready(self, server: RouterServer) -> None:
        await server.wait_ready()
        self._tell(
            progress="ready",
            address=server.address,
            http=server.http_address,
            metrics=server.metrics_address,
        )


def _reason(error: BaseException) -> str:
    """In one line: what an operator needs, or what a developer needs to look further."""
    return error.message if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"

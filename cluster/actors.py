"""The Ray actors: each is one process that runs one of our servers.

A server runs on an event loop of its own, in a thread that the constructor
starts: Ray restarts a dead actor by calling its constructor again, and the
new process finds its way back by telling the controller its new address.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import threading

import ray
import uvloop

from cluster.controller import CONTROLLER, Member
from core import config as configs
from core.errors import BatonError
from core.types import Role

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0


class _ServerActor:
    """Runs `_serve` on an event loop of its own; the process ends if that fails."""

    def __init__(self, tree: dict[str, object], member: Member) -> None:
        self._config = configs.parse(tree)
        self._member = member
        self._controller = ray.get_actor(CONTROLLER)
        self._loop = uvloop.new_event_loop()
        self._stopping = asyncio.Event()
        logging.basicConfig(level=self._config.log_level.upper())
        self._thread = threading.Thread(target=self._run, name=member.worker_id, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the server in order; returns when it has let go of everything."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BatonError as error:
            # Starting again would fail again: say so, and stay down.
            self._tell(progress="failed", error=error.message)
        except BaseException:
            log.exception("this process can no longer be trusted and ends")
            os._exit(1)

    def _tell(self, **changes: str) -> None:
        """Tells the controller how far this process is; does not wait for it."""
        self._member = dataclasses.replace(self._member, **changes)  # type: ignore[arg-type]
        self._controller.update.remote(self._member)

    async def _serve(self) -> None:
        raise NotImplementedError


class WorkerActor(_ServerActor):
    """One worker of either role."""

    async def _serve(self) -> None:
        self._tell(progress="importing torch")
        # Imported here so that the controller hears from this process before torch is there.
        from decode_worker.role import DecodeRole
        from prefill_worker.role import PrefillRole
        from worker.server import WorkerServer

        role = self._member.role
        assert role is not None
        server = WorkerServer(
            self._config,
            role,
            self._member.worker_id,
            PrefillRole if role is Role.PREFILL else DecodeRole,
            progress=lambda text: self._tell(progress=text),
        )
        await server.start(self._member.host or ray.util.get_node_ip_address(), 0)
        self._tell(progress="ready", address=server.address)
        await server.serve_until(self._stopping)


class RouterActor(_ServerActor):
    """One router."""

    def __init__(self, tree: dict[str, object], member: Member, controller_address: str) -> None:
        self._controller_address = controller_address
        super().__init__(tree, member)

    async def _serve(self) -> None:
        from router.server import RouterServer

        self._tell(progress="loading the tokenizer")
        server = RouterServer(self._config, self._member.worker_id)
        await server.start(self._controller_address)
        self._tell(progress="waiting for workers")
        await server.wait_ready()
        self._tell(progress="ready", address=server.address, metrics=server.metrics_address)
        await server.serve_until(self._stopping)

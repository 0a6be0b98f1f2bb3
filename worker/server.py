"""A whole worker in one process: event loop, engine thread, transfer thread.

start()        loads the model, makes the pool reachable, serves; then `address` is known
serve_until()  waits for the word to stop, then ends the streams, the engine thread and the
               transfers, in that order; raises when the engine can no longer be trusted
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

import grpc
import torch
from prometheus_client import start_http_server

from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.v1.transfer_pb2 import PoolLayout
from core import model_store, types
from core.config import Config
from core.errors import Internal
from core.types import PROTOCOL
from core.wire import role_to
from engine.engine import Engine
from kv_transfer.layout import LAYOUT_VERSION
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.thread import TransferThread
from kv_transfer.transport import PoolMemory
from worker.cpu import claim_threads, stand_back
from worker.engine_thread import EngineThread, Inbox, Stop
from worker.metrics import WorkerMetrics
from worker.outbox import Outbox
from worker.role import Role
from worker.service import WorkerService

log = logging.getLogger(__name__)

MESSAGE_BYTES = 64 * 2**20

RoleFactory = Callable[[Engine, TransferThread, Outbox, WorkerMetrics, Config], Role]
Progress = Callable[[str], None]


class WorkerServer:
    def __init__(
        self,
        config: Config,
        role: types.Role,
        worker_id: str,
        make_role: RoleFactory,
        progress: Progress = log.info,
    ) -> None:
        self._config = config
        self._role = role
        self._worker_id = worker_id
        self._make_role = make_role
        self._progress = progress
        self._incarnation = secrets.randbits(64)
        self._inbox = Inbox()
        self._metrics = WorkerMetrics(worker_id, role)

    async def start(self, host: str, port: int) -> None:
        """Loads, connects and serves. When this returns, the worker takes requests."""
        loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = loop.create_future()
        ready = asyncio.Event()
        self._outbox = Outbox(loop)
        self._thread = EngineThread(
            self._build_role,
            self._inbox,
            self._outbox,
            on_ready=lambda: loop.call_soon_threadsafe(ready.set),
            on_failure=lambda error: loop.call_soon_threadsafe(self._fail, error),
        )
        self._thread.start()
        await self._wait_for(ready)
        await self._serve(host, port)

    def serve_metrics(self, host: str, port: int) -> None:
        start_http_server(port, addr=host, registry=self._metrics.registry)

    async def serve_until(self, stopped: asyncio.Event) -> None:
        """Serves until `stopped`. Requests under way then fail at their routers as lost."""
        await self._wait_for(stopped)
        await self._server.stop(grace=0.5)
        self._inbox.put(Stop())
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._transfer.stop)

    async def _wait_for(self, event: asyncio.Event) -> None:
        """Returns when the event is set; raises when the engine thread fails before."""
        waiting = asyncio.ensure_future(event.wait())
        first: set[asyncio.Future[Any]] = {waiting, self._failure}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            waiting.cancel()
            self._failure.result()

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _build_role(self) -> Role:
        """On the engine thread: the engine belongs to it from the first moment."""
        config = self._config
        device = config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu" and self._role is types.Role.DECODE:
            stand_back(config.decode.nice)
        dtype = config.dtype
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16"
        self._progress("loading the model")
        self._engine = Engine.load(
            model_store.locate(config.model),
            dtype=dtype,
            device=device,
            page_size=config.page_size,
            kv_memory=config.pool(self._role).kv_memory,
            max_context=config.max_context,
            threads=claim_threads(config, self._role),
        )
        self._progress("opening the transfer layer")
        self._transfer = TransferThread(
            NixlTransport(),
            pool_memory(self._engine),
            pool_layout(self._engine),
            self._inbox.put,
        )
        self._transfer.start()
        return self._make_role(self._engine, self._transfer, self._outbox, self._metrics, config)

    async def _serve(self, host: str, port: int) -> None:
        options = [
            ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ("grpc.max_send_message_length", MESSAGE_BYTES),
            # Routers ask whether we are there while a long step runs.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ]
        self._server = grpc.aio.server(options=options)
        service = WorkerService(self._inbox, self._outbox, self._welcome)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, self._server)
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise Internal(f"cannot listen on {host}:{port}") from error
        self.address = f"{host}:{bound}"
        await self._server.start()

    def _welcome(self) -> pb.Welcome:
        return pb.Welcome(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            role=role_to(self._role),
            protocol=PROTOCOL,
            model=model_store.model_name(self._config),
            context_length=self._engine.context_length,
            pool=self._transfer.pool_address,
            total_pages=self._engine.pool.total,
        )


def pool_memory(engine: Engine) -> PoolMemory:
    kv = engine.kv
    return PoolMemory(
        base=kv.data_ptr(),
        page_bytes=kv[0].numel() * kv.element_size(),
        total_pages=engine.pool.total,
        device=kv.device.type,
        device_id=kv.device.index or 0,
    )


def pool_layout(engine: Engine) -> PoolLayout:
    # kv: [page, layer, k/v, token, kv_head, dim]
    _, layers, _, page_size, kv_heads, head_dim = engine.kv.shape
    return PoolLayout(
        version=LAYOUT_VERSION,
        model=engine.fingerprint,
        dtype=str(engine.kv.dtype).removeprefix("torch."),
        page_size=page_size,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )

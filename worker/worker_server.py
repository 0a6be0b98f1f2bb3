"""A whole worker in one process: event loop, engine thread, transfer thread.

start()        loads the model, makes the pool reachable, serves; sets `address`
serve_until()  waits for the stop signal or a router's Drain; finishes requests or hands
               them back; then ends the streams, the engine thread and the transfers, in
               that order; raises if the engine has failed

A router may switch its role meanwhile:

    serving ─SwitchRole─▶ draining ─nothing left─▶ the other phase on the same engine ─▶ serving
       ▲                      │
       └── same role ─────────┘ transfers that do not end

The process, its engine, pool, prefix cache, transports and streams to routers stay.
On a whole GPU the engine thread stays too, with the libraries' state of this thread;
elsewhere each phase has a thread of its own (`Backend.keeps_thread`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.core import model_store
from baton.core.config import Config
from baton.core.errors import Internal
from baton.core.metrics import serve_metrics
from baton.core.process import StartTimes, StopSignal, raise_open_files
from baton.core.tls import check_worker, is_loopback, node_identity
from baton.core.types import MAX_MESSAGE_BYTES, PROTOCOL, Role
from baton.core.wire import role_to
from baton.rpc import listen
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker.adapter_files import AdapterFilesService
from baton.worker.backend import Backend, ReportProgress
from baton.worker.engine_thread import (
    HAND_BACK_SECONDS,
    Drain,
    EngineInbox,
    EngineThread,
    MakePhase,
    Stop,
)
from baton.worker.metrics import WorkerMetrics
from baton.worker.outbox import Outbox
from baton.worker.ranks import RankKilled
from baton.worker.step_record import StepRecord
from baton.worker.worker_service import WorkerService

log = logging.getLogger(__name__)

WORKER = pb.DESCRIPTOR.services_by_name["Worker"].full_name
HEALTH_SECONDS = 1.0
# For queued messages to reach the routers.
GRACE_SECONDS = 2.0


class WorkerServer:
    def __init__(
        self,
        config: Config,
        role: Role,
        worker_id: str,
        progress: ReportProgress = log.info,
        on_role: Callable[[Role], None] = lambda role: None,
        on_leaving: Callable[[], None] = lambda: None,
        times: StartTimes | None = None,
        record: StepRecord | None = None,
    ) -> None:
        """`on_role` is called after a role switch, `on_leaving` when the worker is asked to drain
        and leave for good. `times` and `record` began with the process."""
        self._config = config
        self._role = role
        self._worker_id = worker_id
        self._progress = progress
        self._on_role = on_role
        self._on_leaving = on_leaving
        self.times = times or StartTimes()
        self.times.mark("imports")
        self._record = record or StepRecord()
        self._inbox = EngineInbox()
        self._metrics = WorkerMetrics(worker_id, role, model_store.model_name(config))
        self.restarts = False  # whether it drains to be restarted
        self.metrics_address = ""  # "host:port"

    async def start(self, host: str, port: int, metrics_port: int | None = None) -> None:
        """Loads the model and serves; with a `metrics_port`, also metrics. When this returns, the
        worker accepts requests. If it raises, it removes the step record: there is no suspect."""
        try:
            await self._start(host, port, metrics_port)
        except BaseException:
            self._record.close()
            raise

    async def _start(self, host: str, port: int, metrics_port: int | None) -> None:
        check_worker(self._config, host)
        raise_open_files()
        if is_loopback(host):
            # All peers are on this machine; NIXL's UCX would listen on every interface.
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = loop.create_future()
        self._drained = asyncio.Event()
        self._drain_asked = asyncio.Event()
        self._switching: asyncio.Task[None] | None = None
        self._outbox = Outbox(loop)
        self._backend = Backend(
            self._config,
            self._worker_id,
            self._inbox,
            self._outbox,
            self._metrics,
            self.times,
            self._record,
            progress=self._progress,
            on_lost=lambda error: loop.call_soon_threadsafe(self._fail, error),
        )
        self._start_thread()
        await self._run_phase(lambda: self._backend.load(self._role))
        if metrics_port is not None:
            server = serve_metrics(self._metrics.registry, host, metrics_port, self._config.tls)
            self.metrics_address = f"{host}:{server.server_port}"
        await self._serve(host, port)
        self.times.mark("server")

    def _start_thread(self) -> None:
        loop = asyncio.get_running_loop()
        self._thread = EngineThread(
            self._inbox,
            self._outbox,
            on_failure=lambda error: loop.call_soon_threadsafe(
                self._fail, self._backend.failure_reason(error)
            ),
        )
        self._thread.start()

    async def _run_phase(self, make_phase: MakePhase) -> None:
        await self._wait_for(asyncio.wrap_future(self._thread.run_phase(make_phase)))

    async def _end_thread(self) -> None:
        self._thread.leave()
        await asyncio.to_thread(self._thread.join)

    @property
    def agent(self) -> str:
        """The transport agent of this process."""
        return self._backend.transfer.pool_address.agent

    @property
    def requests(self) -> int:
        """Requests running or waiting."""
        return self._thread.requests

    async def serve_until(self, stopping: StopSignal) -> None:
        """Serves until the stop signal or a router's Drain; then finishes requests for
        `drain_seconds` and hands the rest back to their routers."""
        asked = (stopping.requested, self._drain_asked)
        await self._wait_for(*(asyncio.ensure_future(each.wait()) for each in asked))
        await self._drain(stopping)
        self._outbox.close()
        await self._server.stop(grace=GRACE_SECONDS)
        self._health_watch.cancel()
        if self._switching is not None:
            self._switching.cancel()
        self._inbox.put(Stop())
        await self._end_thread()
        for_good = not (stopping.requested.is_set() or self.restarts or self._failure.done())
        await asyncio.to_thread(self._backend.close, for_good=for_good)
        if self._failure.done():
            self._failure.result()
        self._record.close()

    def drain(self, restart: bool = False) -> None:
        """Makes `serve_until` return when all requests have ended or were handed back."""
        self.restarts = restart
        self._drain_asked.set()
        if not restart:
            self._on_leaving()

    async def drain_asked(self) -> None:
        """Waits until the worker begins to drain for its end."""
        await self._drain_asked.wait()

    async def _drain(self, stopping: StopSignal) -> None:
        self._drain_asked.set()
        await self._report_health()
        drain, loop = Drain(self._config.drain_seconds), asyncio.get_running_loop()
        drain.done.add_done_callback(lambda _: loop.call_soon_threadsafe(self._drained.set))
        self._inbox.put(drain)
        limit = self._config.drain_seconds + HAND_BACK_SECONDS
        await stopping.wait_at_most(limit, self._drained)

    def switch(self, role: Role) -> None:
        """Starts a role switch. Ignored while the process drains, and during another switch, whose
        outcome is sent to all routers."""
        if self._draining:
            return
        if role is self._role:
            self._broadcast_role(pb.RoleSwitched())
        else:
            self._switching = asyncio.ensure_future(self._switch(role))

    async def _switch(self, role: Role) -> None:
        log.info("switching to role %s", role.value)
        began = time.monotonic()
        await self._report_health()
        drain = Drain(self._config.drain_seconds, retire=True)
        self._inbox.put(drain)
        error = await asyncio.wrap_future(drain.done)
        drained = time.monotonic()
        if not error:
            self._role = role
            if not self._backend.keeps_thread:
                await self._end_thread()
                self._start_thread()
            await self._run_phase(lambda: self._backend.switch_role(role))
            self._on_role(role)
        ended = time.monotonic()
        outcome = f"failed: {error}" if error else f"took {ended - drained:.3f} s"
        log.info("the switch to role %s %s", role.value, outcome)
        self._switching = None
        self._broadcast_role(
            pb.RoleSwitched(
                drain_seconds=drained - began, switch_seconds=ended - drained, error=error
            )
        )
        await self._report_health()

    def _broadcast_role(self, switched: pb.RoleSwitched) -> None:
        switched.welcome.CopyFrom(self._welcome())
        self._outbox.broadcast_now(pb.WorkerMessage(role_switched=switched))

    @property
    def _draining(self) -> bool:
        """True while new requests are refused, before the end or a role switch."""
        return self._drain_asked.is_set() or self._switching is not None

    async def _watch_health(self) -> None:
        while True:
            await self._report_health()
            self._record.refresh()
            await asyncio.sleep(HEALTH_SECONDS)

    async def _report_health(self) -> None:
        """Reports the process as live, and as ready while its engine is sound and it accepts
        requests."""
        status = health_pb2.HealthCheckResponse
        problem = self._thread.problem(self._config.router.engine_stall_seconds)
        ready = not problem and not self._draining
        await self._health.set("", status.SERVING)
        await self._health.set(WORKER, status.SERVING if ready else status.NOT_SERVING)

    async def _wait_for(self, *futures: asyncio.Future[Any]) -> None:
        """Returns when one is done; raises if the worker fails first."""
        first = {*futures, self._failure}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        for future in futures:
            future.cancel()
        if self._failure.done():
            self._failure.result()

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, RankKilled):
            self._record.crash(error)
        if not self._failure.done():
            self._failure.set_exception(error)
        self._drained.set()

    async def _serve(self, host: str, port: int) -> None:
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            # Routers ping while a long step runs.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ]
        self._server = grpc.aio.server(options=options)
        service = WorkerService(
            self._inbox,
            self._outbox,
            self._welcome,
            on_drain=self.drain,
            on_switch=self.switch,
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(service, self._server)
        files = AdapterFilesService(self._config.allowed_adapters)
        worker_pb2_grpc.add_AdapterFilesServicer_to_server(files, self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        try:
            bound = listen(self._server, f"{host}:{port}", node_identity(self._config))
        except RuntimeError as error:
            raise Internal(f"cannot listen on {host}:{port}") from error
        self.address = f"{host}:{bound}"
        await self._server.start()
        self._health_watch = asyncio.ensure_future(self._watch_health())

    def _welcome(self) -> pb.Welcome:
        engine = self._backend.engine
        return pb.Welcome(
            worker_id=self._worker_id,
            incarnation=self._record.incarnation,
            role=role_to(self._role),
            protocol=PROTOCOL,
            model=model_store.model_name(self._config),
            context_length=engine.context_length,
            pool=self._backend.transfer.pool_address,
            total_pages=engine.pool.total,
            draining=self._draining,
            cache_root=engine.pool.root or b"",
            metrics_address=self.metrics_address,
            verdicts=self._record.verdicts,
            quantization=self._config.quantization.removeprefix("none"),
            kv_dtype=self._config.kv_dtype.removeprefix("auto"),
        )

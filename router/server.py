"""A whole router in one process.

start()        loads the tokenizer, attaches to the workers, serves
serve_until()  waits for the word to stop, then ends the calls under way and the links
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server

from baton.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from core import model_store
from core.config import Config
from core.errors import Internal
from router.grpc_edge import AdminService, InferenceService
from router.membership import follow
from router.metrics import RouterMetrics
from router.roster import Roster
from router.serving import Serving
from router.text import Text

MESSAGE_BYTES = 64 * 2**20
INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
ADMIN = cluster_pb2.DESCRIPTOR.services_by_name["Admin"].full_name


class RouterServer:
    def __init__(self, config: Config, router_id: str = "") -> None:
        self._config = config
        self._router_id = router_id or f"router-{secrets.token_hex(4)}"
        self._metrics = RouterMetrics()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, controller: str = "") -> None:
        """Serves on the configured port. Members come from the controller at that address, or
        from the configuration."""
        model = model_store.model_name(self._config)
        folder = model_store.locate(self._config.model)
        text = await asyncio.to_thread(Text.load, folder)
        self._health = health.aio.HealthServicer()
        self._roster = Roster(self._router_id, model, on_change=self._report_health)
        self._serving = Serving(text, self._roster, self._config.router, self._metrics)
        self._metrics.watch(self._roster.links)
        await self._serve(model)
        self._serve_metrics()
        self._roster.set_addresses(self._config.members.workers)
        if controller:
            self._start(follow(controller, self._roster))

    async def wait_ready(self) -> None:
        """Returns when a request could be placed."""
        while not self._roster.ready:
            await self._roster.change()

    async def serve_until(self, stopped: asyncio.Event) -> None:
        """Serves until `stopped`; calls under way are then cancelled, and their workers told."""
        await stopped.wait()
        for task in self._tasks:
            task.cancel()
        await self._server.stop(grace=0.5)
        await self._roster.stop()
        self._metrics_server.shutdown()

    async def _serve(self, model: str) -> None:
        options = [
            ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ("grpc.max_send_message_length", MESSAGE_BYTES),
            # Clients ask whether we are there while they wait for a token.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            # Without this a second router on the same port would share its calls.
            ("grpc.so_reuseport", 0),
        ]
        self._server = grpc.aio.server(options=options)
        inference = InferenceService(self._serving, self._roster, model)
        admin = AdminService(self._serving, self._roster, model, self._router_id)
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, self._server)
        cluster_pb2_grpc.add_AdminServicer_to_server(admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (INFERENCE, ADMIN, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.address = self._bind()
        self._report_health()
        await self._server.start()

    def _bind(self) -> str:
        host, port = self._config.router.host, self._config.router.port
        try:
            return f"{host}:{self._server.add_insecure_port(f'{host}:{port}')}"
        except RuntimeError:
            raise Internal(f"cannot listen on {host}:{port}; is the port taken?") from None

    def _serve_metrics(self) -> None:
        host, port = self._config.router.host, self._config.router.metrics_port
        try:
            self._metrics_server, _ = start_http_server(
                port, addr=host, registry=self._metrics.registry
            )
        except OSError:
            raise Internal(f"cannot serve metrics on {host}:{port}; is the port taken?") from None
        self.metrics_address = f"{host}:{self._metrics_server.server_port}"

    def _report_health(self) -> None:
        status = health_pb2.HealthCheckResponse
        now = status.SERVING if self._roster.ready else status.NOT_SERVING
        for service in ("", INFERENCE):
            self._start(self._health.set(service, now))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Runs in the background; kept until it is done, as the event loop would not."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

"""A whole router in one process.

start()        loads the tokenizer, attaches to the workers, serves
serve_until()  waits for the stop signal, finishes requests within drain_seconds, then ends calls
               and links
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from typing import TYPE_CHECKING

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.core import model_store
from baton.core.config import Config
from baton.core.errors import Internal
from baton.core.generation_defaults import GenerationDefaults, read_defaults
from baton.core.metrics_server import serve_metrics
from baton.core.process import StopSignal
from baton.core.tasks import cancel_all
from baton.core.tls import (
    check_router,
    edge_identity,
    node_identity,
)
from baton.router.edges.auth import KeyRing
from baton.router.edges.edge_context import EdgeContext
from baton.router.edges.grpc.open_inference import OpenInferenceService
from baton.router.edges.grpc.servicers import AdminService, InferenceService, make_server
from baton.router.observe.metrics import RouterMetrics
from baton.router.observe.overview import RouterOverview
from baton.router.observe.spans import Spans
from baton.router.placement.placer import Placer
from baton.router.prompts.embedding_model import EmbeddingModel
from baton.router.prompts.text import Text
from baton.router.requests.adapter_names import AdapterNames
from baton.router.requests.serving import Serving
from baton.router.response_cache.cached_responses import CachedResponses
from baton.router.workers.controller_client import ControllerClient
from baton.router.workers.membership import Membership
from baton.rpc import listen
from baton.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    open_inference_pb2,
    open_inference_pb2_grpc,
)

if TYPE_CHECKING:
    from baton.router.edges.http.http_server import HttpServer

log = logging.getLogger(__name__)

GRACE_SECONDS = 2.0
"""For clients to receive the end of complete answers."""

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
ADMIN = cluster_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
(_SERVICE,) = open_inference_pb2.DESCRIPTOR.services_by_name.values()
OPEN_INFERENCE = _SERVICE.full_name


class RouterServer:
    def __init__(self, config: Config, router_id: str = "") -> None:
        self._config = config
        self._router_id = router_id or f"router-{secrets.token_hex(4)}"
        self._metrics = RouterMetrics()
        self._tasks: set[asyncio.Task[None]] = set()
        self._batches: asyncio.Task[None] | None = None

    async def start(self, controller: str = "") -> None:
        """Serves on the configured port. The controller at that address provides the members, or
        the configuration."""
        check_router(self._config)
        self._keys = KeyRing(self._config.router.keys)
        model = model_store.model_name(self._config)
        folder = await asyncio.to_thread(model_store.locate, self._config.model, weights=False)
        router = self._config.router
        text = await asyncio.to_thread(Text.load, folder, router.tool_format, router.reasoning)
        defaults = read_defaults(folder, router.generation_config)
        if str(defaults):
            log.info("the model's defaults for requests: %s", defaults)
        self._health = health.aio.HealthServicer()
        self._membership = Membership(self._router_id, model, self._config)
        placer = Placer(self._membership, router)
        adapters = AdapterNames(model, self._config.allowed_adapters)
        for name, adapter_folder in self._config.adapters.items():
            adapters.name(name, await adapters.read(name, adapter_folder))
        embedding = self._config.embedding_model
        encoder = await asyncio.to_thread(EmbeddingModel.load, embedding) if embedding else None
        cache, digest = self._config.cache, b""
        if encoder and cache.responses == "semantic":
            digest = await asyncio.to_thread(encoder.digest)
        self._responses = CachedResponses.open(cache, self._metrics, digest)
        self._serving = Serving(
            text,
            self._membership,
            placer,
            router,
            self._metrics,
            self._responses,
            adapters,
            encoder,
        )
        self._membership.listen(self._report_health)
        self._metrics.watch(self._membership.links)
        self._spans: Spans | None = None
        if endpoint := router.otlp_endpoint:
            self._spans = Spans(endpoint, model, self._router_id)
            self._serving.ledgers.listen(self._spans.send)
        client = ControllerClient(controller, node_identity(self._config))
        await self._serve_grpc(model, defaults, client)
        self._http = self._serve_http()
        self._serve_metrics()
        self._membership.set_addresses(self._config.members.workers)
        if controller:
            self._start(client.follow(self._membership, self._serving.adapters))
            self._start(client.report(self._router_id, self._serving, self._membership))
        if seconds := router.canary_seconds:
            self._start(self._serving.dispatcher.run_canary(seconds))

    async def wait_ready(self) -> None:
        """Returns when some prefill worker can push to some decode worker."""
        await self._membership.wait_until(lambda: self._membership.pairs.any_usable)

    async def serve_until(self, stopping: StopSignal) -> None:
        """Serves until the stop signal, then finishes requests within drain_seconds, and cancels
        what is left on the workers."""
        await stopping.requested.wait()
        self._serving.draining = True
        self._report_health()
        if self._batches:
            # They are continued by the next router.
            await cancel_all(self._batches)
        await stopping.wait_at_most(self._config.drain_seconds, self._serving.idle)
        for task in self._tasks:
            task.cancel()
        calls = [self._server.stop(grace=0.0 if self._serving.active else GRACE_SECONDS)]
        if self._http:
            calls.append(self._http.stop(GRACE_SECONDS))
        # It polls twice a second.
        calls.append(asyncio.to_thread(self._metrics_server.shutdown))
        await asyncio.gather(*calls)
        await self._membership.stop()
        if self._responses:
            await self._responses.close()
        if self._spans:
            await asyncio.to_thread(self._spans.close)

    async def _serve_grpc(
        self, model: str, defaults: GenerationDefaults, controller: ControllerClient
    ) -> None:
        limits = self._config.router
        self._server = make_server(self._keys, limits.max_requests)
        self._edges = EdgeContext(
            self._serving,
            self._membership,
            self._keys,
            model,
            limits.reader_buffer,
            defaults,
            controller,
        )
        inference = InferenceService(self._edges)
        self._overview = RouterOverview(
            self._serving, self._membership, model, self._router_id, limits.max_queued
        )
        admin = AdminService(self._edges, self._overview)
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, self._server)
        cluster_pb2_grpc.add_AdminServicer_to_server(admin, self._server)
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
            OpenInferenceService(self._edges), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (INFERENCE, ADMIN, OPEN_INFERENCE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        host, port = limits.host, limits.port
        try:
            bound = listen(self._server, f"{host}:{port}", edge_identity(self._config))
        except RuntimeError:
            raise Internal(f"cannot listen on {host}:{port}; is the port taken?") from None
        self.address = f"{host}:{bound}"
        self._report_health()
        await self._server.start()

    def _serve_http(self) -> HttpServer | None:
        """None when a library for HTTP is not installed."""
        self.http_address = ""
        try:
            from baton.router.edges.http.batches.batch_runner import BatchRunner
            from baton.router.edges.http.batches.batch_store import open_batches
            from baton.router.edges.http.batches.spare_capacity import SpareCapacity
            from baton.router.edges.http.http_app import HttpApp
            from baton.router.edges.http.http_server import HttpServer
        except ModuleNotFoundError as missing:
            library = str(missing.name).partition(".")[0]
            log.warning("%s is not installed: gRPC is served, HTTP is not", library)
            return None
        limits = self._config.router
        app = HttpApp(
            self._edges,
            self._overview,
            self._metrics.registry,
            open_metrics=limits.open_metrics,
            cors_origins=limits.cors_origins,
            batches=(batches := open_batches(self._config.batches)),
        )
        if batches:
            spare = SpareCapacity(self._edges, self._config)
            runner = BatchRunner(batches, spare, self._keys, app.batched)
            self._batches = asyncio.create_task(runner.run())
        server = HttpServer(app.app, self._edges.end_calls, self._config.tls)
        self.http_address = server.start(limits.host, limits.http_port)
        return server

    def _serve_metrics(self) -> None:
        router = self._config.router
        port = router.metrics_port
        host = router.host if router.open_metrics or not self._keys.required else "127.0.0.1"
        registry = self._metrics.registry
        self._metrics_server = serve_metrics(registry, host, port, self._config.tls)
        self.metrics_address = f"{host}:{self._metrics_server.server_port}"

    def _report_health(self) -> None:
        """The process is live without workers; it is ready when it can place requests."""
        status = health_pb2.HealthCheckResponse
        ready = self._serving.placer.can_place and not self._serving.draining
        self._start(self._health.set("", status.SERVING))
        self._start(self._health.set(INFERENCE, status.SERVING if ready else status.NOT_SERVING))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Runs in the background. The event loop holds only a weak reference to a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

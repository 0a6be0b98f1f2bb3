"""A whole router in one process.

start()        loads the tokenizer, attaches to the workers, serves
serve_until()  waits for the stop signal, finishes requests within drain_seconds, then closes calls
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

from baton.core.config import Config, own_keys, served_configs
from baton.core.errors import Internal
from baton.core.metrics import end_metrics, serve_metrics
from baton.core.model_store import model_name
from baton.core.process import StopSignal, cancel_all, raise_open_files
from baton.core.tls import (
    check_router,
    edge_identity,
    node_identity,
)
from baton.router.edges.auth import KeyRing
from baton.router.edges.edge_context import EdgeContext
from baton.router.edges.grpc.open_inference import OpenInferenceService
from baton.router.edges.grpc.servicers import AdminService, InferenceService, make_server
from baton.router.followed_models import FollowedModels
from baton.router.observe.metrics import CacheMetrics, MetricsByModel
from baton.router.observe.overview import RouterOverview
from baton.router.observe.spans import Spans
from baton.router.prompts.embedding_model import EmbeddingModel
from baton.router.requests.serving import Activity
from baton.router.response_cache.cached_responses import CachedResponses
from baton.router.served_models import ServedModels, SharedParts
from baton.router.workers.controller_client import ControllerClient
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
"""Time for clients to receive the end of their answers, or the error that ends them."""

CHECK_SECONDS = 1.0
"""Interval at which `wait_ready` looks for models that were removed."""

OTHER_FILES = 256
"""Files and connections of a router beside those of requests."""

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
ADMIN = cluster_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
(_SERVICE,) = open_inference_pb2.DESCRIPTOR.services_by_name.values()
OPEN_INFERENCE = _SERVICE.full_name


class RouterServer:
    def __init__(self, config: Config, router_id: str = "") -> None:
        self._config = config
        self._router_id = router_id or f"router-{secrets.token_hex(4)}"
        self._metrics = MetricsByModel()
        self._cache_metrics = CacheMetrics(self._metrics.registry)
        self.models = ServedModels()
        self._tasks: set[asyncio.Task[None]] = set()
        self._batches: asyncio.Task[None] | None = None

    async def start(self, controller: str = "") -> None:
        """Serves on the configured port. The members come from the controller at that address, or
        without one from the configuration."""
        check_router(self._config)
        self._open_files = raise_open_files()
        self._check_open_files(self._open_files)
        self._keys = KeyRing(self._config.router.keys)
        shared = await self._make_shared_parts()
        self._responses = shared.responses
        client = ControllerClient(controller, node_identity(self._config))
        self._followed = FollowedModels(
            self._config, self.models, shared, client, self._report_health
        )
        self._health = health.aio.HealthServicer()
        self._prepare_edges(client)
        await self._load_models(client)
        await self._serve_grpc()
        self._http = self._serve_http()
        self._serve_metrics()
        if controller:
            self._start(client.follow(self._followed.apply))
            self._start(client.report(self._router_id, lambda: self._followed.all))

    def _check_open_files(self, limit: int) -> None:
        """A connection beyond the limit is closed unread, without a trace."""
        if limit < (needed := self._config.router.max_requests + OTHER_FILES):
            log.warning(
                "only %d files may be open (ulimit -n): router.max_requests of %d needs %d",
                limit,
                self._config.router.max_requests,
                needed,
            )

    async def _make_shared_parts(self) -> SharedParts:
        config, digest = self._config, b""
        folder = config.embedding_model
        encoder = await asyncio.to_thread(EmbeddingModel.load, folder) if folder else None
        if encoder and config.cache.responses == "semantic":
            digest = await asyncio.to_thread(encoder.digest)
        responses = CachedResponses.open(config.cache, self._cache_metrics, digest)
        activity = Activity(config.router)
        self._spans: Spans | None = None
        if endpoint := config.router.otlp_endpoint:
            self._spans = Spans(endpoint, self._router_id)
            activity.ledgers.listen(self._spans.send)
        self._activity = activity
        return SharedParts(self._router_id, activity, self._metrics, responses, encoder)

    async def _load_models(self, controller: ControllerClient) -> None:
        """Loads the controller's models, or the configuration's if it does not answer."""
        named = await controller.models()
        others = {each.name: each for each in named or ()}
        for config in served_configs(self._config):
            name, keys = model_name(config), own_keys(self._config, config)
            if named is None or (name in others and others[name].keys == keys):
                others.pop(name, None)
                await self._load(config, keys)
        await self._followed.begin(others.values())

    async def _load(self, config: Config, keys: str) -> None:
        """Loads a model of the configuration. An error ends the start."""
        model = await self._followed.load(config, keys)
        self._followed.add(model)
        model.membership.set_addresses(config.members.workers)

    async def wait_ready(self) -> None:
        """Returns once every model has a prefill worker that can push to a decode worker."""
        while waits := [each for each in self.models if not each.membership.pairs.any_usable]:
            membership = waits[0].membership
            # Bounded, since the model may be removed meanwhile.
            await membership.wait_until(lambda: membership.pairs.any_usable, CHECK_SECONDS)  # noqa: B023

    async def serve_until(self, stopping: StopSignal) -> None:
        """Serves until the stop signal, finishes requests within drain_seconds, then cancels the
        others on the workers."""
        await stopping.requested.wait()
        self._activity.draining = True
        self._report_health()
        if self._batches:
            # The next router continues them.
            await cancel_all(self._batches)
        await stopping.wait_at_most(self._config.drain_seconds, self._activity.idle)
        for task in self._tasks:
            task.cancel()
        self._edges.end_calls()
        calls = [self._server.stop(GRACE_SECONDS)]
        if self._http:
            calls.append(self._http.stop(GRACE_SECONDS))
        calls.append(asyncio.to_thread(end_metrics, self._metrics_server))
        await asyncio.gather(*calls)
        await self._followed.close()
        if self._responses:
            await self._responses.close()
        if self._spans:
            await asyncio.to_thread(self._spans.close)

    def _prepare_edges(self, controller: ControllerClient) -> None:
        limits = self._config.router
        self._edges = EdgeContext(
            self.models,
            self._activity,
            self._keys,
            limits.reader_buffer,
            controller,
            self._responses,
        )
        self._overview = RouterOverview(
            self.models, self._activity, self._router_id, limits.max_queued
        )

    async def _serve_grpc(self) -> None:
        limits = self._config.router
        self._server = make_server(self._keys, limits.max_requests)
        inference = InferenceService(self._edges)
        admin = AdminService(self._edges, self._overview, self._followed)
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
        """Returns None if a library for HTTP is not installed."""
        self.http_address = ""
        try:
            from baton.router.edges.http.batches.batch_runner import BatchRunner
            from baton.router.edges.http.batches.batch_store import open_batches
            from baton.router.edges.http.batches.spare_capacity import SpareCapacity
            from baton.router.edges.http.http_app import HttpApp
            from baton.router.edges.http.http_server import MAX_CONNECTIONS, HttpServer
        except ModuleNotFoundError as missing:
            library = str(missing.name).partition(".")[0]
            log.warning("%s is not installed: gRPC is served, HTTP is not", library)
            return None
        limits = self._config.router
        app = HttpApp(
            self._edges,
            self._overview,
            self._metrics.registry,
            self._followed,
            open_metrics=limits.open_metrics,
            cors_origins=limits.cors_origins,
            batches=(batches := open_batches(self._config.batches)),
        )
        if batches:
            spare = SpareCapacity(self._edges, self._config)
            runner = BatchRunner(batches, spare, self._keys, app.batched)
            self._batches = asyncio.create_task(runner.run())
        # With few files, idle connections must give way before no more can be opened.
        files = max(self._open_files - OTHER_FILES, self._open_files // 2)
        most = min(MAX_CONNECTIONS, files)
        server = HttpServer(app.app, self._edges.end_calls, self._config.tls, most)
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
        """Reports the process as live even without workers, and as ready while it can place
        requests."""
        status = health_pb2.HealthCheckResponse
        ready = self._edges.can_place and not self._activity.draining
        self._start(self._health.set("", status.SERVING))
        self._start(self._health.set(INFERENCE, status.SERVING if ready else status.NOT_SERVING))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Runs a task in the background. The event loop itself keeps only weak references."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

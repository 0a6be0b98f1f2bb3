"""The gRPC servicers, Inference for users and Admin for operators, behind an interceptor that
checks the API key and decodes the message."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from baton.core.bounds import MAX_REQUEST_BYTES
from baton.core.errors import (
    BatonError,
    InvalidRequest,
    NotServed,
    PermissionDenied,
)
from baton.core.types import MAX_MESSAGE_BYTES
from baton.router.answers.answer_events import EmbeddedInputs
from baton.router.edges.auth import Caller, KeyRing
from baton.router.edges.edge_context import EdgeContext, ParsedCall, complete_call
from baton.router.edges.grpc.protobuf import parse_embed, parse_prompt, parse_request, response
from baton.router.followed_models import FollowedModels
from baton.router.observe import time_breakdown
from baton.router.observe.ledger import CACHE_HEADER
from baton.router.observe.overview import RouterOverview
from baton.rpc import Context, abort, to_status, unary
from baton.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc, timing_pb2, worker_pb2
from baton.v1 import inference_pb2 as pb

_ADMIN = cluster_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
# Allowed with any key: they change nothing and show nothing of other callers.
_READ_ONLY = {
    f"/{_ADMIN}/{name}" for name in ("Status", "Pools", "Plan", "Timing", "Diagnose", "Trends")
}
_PACKAGES = (f"/{pb.DESCRIPTOR.package}.", "/inference.")
# Need no key, like health and reflection, which are in other packages.
_OPEN = {f"/inference.GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady")}

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


def _metadata(context: Context, key: str) -> str:
    """The first value of a key, or an empty string."""
    metadata = context.invocation_metadata() or ()
    value = next((value for name, value in metadata if name == key), "")
    return value if isinstance(value, str) else ""


def caller_of(keys: KeyRing, context: Context) -> Caller:
    return keys.caller(_metadata(context, "authorization"))


def prepare(
    edge: EdgeContext,
    message: pb.GenerateRequest | pb.EmbedRequest,
    context: Context,
    arrived: float,
) -> ParsedCall:
    """Parses the message of a call that arrived at `arrived`."""
    caller = caller_of(edge.keys, context)
    model = edge.find(message.model, caller)
    if isinstance(message, pb.EmbedRequest):
        requests = parse_embed(message)
    else:
        requests = [parse_request(message, model.defaults)]
    requests = [model.addressed(each, message.model) for each in requests]
    left = context.time_remaining()
    deadline = math.inf if left is None else arrived + left
    header = functools.partial(_metadata, context)
    return complete_call(caller, model, requests, header, arrived, deadline)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, context: EdgeContext) -> None:
        self._context = context

    async def Generate(  # type: ignore[override]
        self, message: pb.GenerateRequest, context: Context
    ) -> None:
        arrived = time.monotonic()
        try:
            call = prepare(self._context, message, context, arrived)
            ledger = call.ledger
            with self._context.admit(call):
                await self._answer(call, context)
                ledger.end()
                timing = (time_breakdown.KEY, time_breakdown.trailer(ledger))
                cache = ((CACHE_HEADER, ledger.cache_header),) if ledger.cache_header else ()
                context.set_trailing_metadata((timing, *cache))
        except Exception as error:  # noqa: BLE001 the edge of the process
            await abort(context, error)

    async def _answer(self, call: ParsedCall, context: Context) -> None:
        (request,) = call.requests
        async with self._context.answers(call) as events:
            async for event in events:
                began = time.monotonic()
                await context.write(response(event, request.model))
                if not isinstance(event, pb.Started):
                    call.ledger.answers[event.index].write(began)

    @unary
    async def Embed(self, message: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        call = prepare(self._context, message, context, time.monotonic())
        requests = call.requests
        dimensions = message.dimensions if message.HasField("dimensions") else None
        embedded = EmbeddedInputs(len(requests), dimensions, normalized=not message.unnormalized)
        with self._context.admit(call):
            await call.model.serving.generate_all(requests, call.ledger, embedded.collect)
        return pb.EmbedResponse(
            embeddings=[pb.Embedding(values=vector) for vector in embedded.vectors()],
            model=requests[0].model,
            prompt_tokens=embedded.prompt_tokens,
        )

    @unary
    async def ListModels(
        self, message: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        names = self._context.model_names(caller_of(self._context.keys, context))
        return pb.ListModelsResponse(models=map(self._model, names))

    def _model(self, name: str) -> pb.Model:
        model = self._context.models.find(name)
        embedding = model.embedding_model
        if embedding and name == embedding.name:
            size = embedding.text.vocabulary_size
            return pb.Model(name=name, context_length=embedding.max_tokens, vocabulary_size=size)
        text = model.serving.text
        return pb.Model(
            name=name,
            context_length=model.membership.context_length(),
            vocabulary_size=text.vocabulary_size,
            has_chat_template=text.has_chat_template,
            parent="" if name == model.name else model.name,
        )

    @unary
    async def Tokenize(self, message: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        model = self._context.find_generating(message.model, caller_of(self._context.keys, context))
        tokens, rendered = await model.serving.tokenize(parse_prompt(message))
        return pb.TokenizeResponse(token_ids=tokens, rendered=rendered)

    @unary
    async def Detokenize(
        self, message: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        model = self._context.find_generating(message.model, caller_of(self._context.keys, context))
        text = await model.serving.detokenize(message.token_ids, message.keep_special_tokens)
        return pb.DetokenizeResponse(text=text)


class AdminService(cluster_pb2_grpc.AdminServicer):
    def __init__(
        self, context: EdgeContext, overview: RouterOverview, followed: FollowedModels
    ) -> None:
        self._overview = overview
        self._followed = followed
        self._models = context.models
        self._responses = context.responses
        self._controller = context.controller
        self._keys = context.keys

    @unary
    async def Status(
        self, message: cluster_pb2.StatusRequest, context: Context
    ) -> cluster_pb2.StatusResponse:
        return self._overview.status(caller_of(self._keys, context))

    @unary
    async def Drain(self, message: cluster_pb2.DrainRequest) -> cluster_pb2.DrainResponse:
        link = self._models.worker(message.worker_id)[1]
        drain = worker_pb2.Drain(restart=message.restart)
        link.send(worker_pb2.RouterMessage(drain=drain))
        return cluster_pb2.DrainResponse()

    @unary
    async def Scale(self, message: cluster_pb2.ScaleRequest) -> cluster_pb2.PoolsResponse:
        return await self._controller.scale(message)

    @unary
    async def Pools(
        self, message: cluster_pb2.PoolsRequest, context: Context
    ) -> cluster_pb2.PoolsResponse:
        caller = caller_of(self._keys, context)
        return self._overview.pools(await self._controller.pools(), caller)

    @unary
    async def Plan(
        self, message: cluster_pb2.PlanRequest, context: Context
    ) -> cluster_pb2.PlanResponse:
        caller = caller_of(self._keys, context)
        if caller.key.models:
            message.model = self._overview.model(message.model, caller).name
        return await self._controller.plan(message)

    @unary
    async def SwitchRole(
        self, message: cluster_pb2.SwitchRoleRequest
    ) -> cluster_pb2.SwitchRoleResponse:
        return await self._controller.switch_role(self._models, message)

    @unary
    async def Timing(
        self, message: cluster_pb2.TimingRequest, context: Context
    ) -> timing_pb2.RequestTiming:
        return self._overview.timing(message.request_id, caller_of(self._keys, context))

    @unary
    async def Recent(self, message: cluster_pb2.RecentRequest) -> cluster_pb2.RecentResponse:
        return cluster_pb2.RecentResponse(requests=self._overview.recent(message.limit))

    @unary
    async def Diagnose(
        self, message: cluster_pb2.DiagnoseRequest, context: Context
    ) -> cluster_pb2.Diagnosis:
        return self._overview.diagnosis(message.model, caller_of(self._keys, context))

    @unary
    async def Trends(
        self, message: cluster_pb2.TrendsRequest, context: Context
    ) -> cluster_pb2.TrendsResponse:
        return self._overview.trends(message.model, caller_of(self._keys, context))

    @unary
    async def ClearResponses(
        self, message: cluster_pb2.ClearResponsesRequest
    ) -> cluster_pb2.ClearResponsesResponse:
        tenant = message.tenant if message.HasField("tenant") else None
        if self._responses is None:
            raise NotServed("this router has no response cache: cache.responses is off")
        deleted = await self._responses.clear(tenant)
        return cluster_pb2.ClearResponsesResponse(responses=deleted)

    @unary
    async def SemanticReport(
        self, message: cluster_pb2.SemanticReportRequest
    ) -> cluster_pb2.SemanticReportResponse:
        rate, same = message.false_hit_rate, message.same_answer
        for name, value in (("false_hit_rate", rate), ("same_answer", same)):
            if not 0 < value <= 1:
                raise InvalidRequest(f"{name} must be above 0 and at most 1", field=name)
        if self._responses is None:
            raise NotServed("this router records no shadow: cache.semantic is not shadow")
        return await self._responses.report(rate, same)

    @unary
    async def AddAdapter(
        self, message: cluster_pb2.AddAdapterRequest
    ) -> cluster_pb2.AddAdapterResponse:
        add = self._controller.add_adapter
        adapter = await add(self._models, message.name, message.folder, message.model)
        return cluster_pb2.AddAdapterResponse(digest=adapter.digest)

    @unary
    async def RemoveAdapter(
        self, message: cluster_pb2.RemoveAdapterRequest
    ) -> cluster_pb2.RemoveAdapterResponse:
        await self._controller.remove_adapter(self._models, message.name)
        return cluster_pb2.RemoveAdapterResponse()

    @unary
    async def AddModel(self, message: cluster_pb2.NamedModel) -> cluster_pb2.AddModelResponse:
        await self._followed.ask_to_add(message)
        return cluster_pb2.AddModelResponse()

    @unary
    async def RemoveModel(
        self, message: cluster_pb2.RemoveModelRequest
    ) -> cluster_pb2.RemoveModelResponse:
        await self._followed.ask_to_remove(message.name)
        return cluster_pb2.RemoveModelResponse()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Checks the API key and decodes the message for our own services. gRPC's own decoding error
    would name our classes."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_PACKAGES):
            return handler
        decode: Any = handler.request_deserializer
        answer: Any = handler.stream_stream or handler.unary_stream or handler.unary_unary

        async def call(content: bytes, context: Context) -> Any:
            await self._admit(method, context)
            return await answer(await _decoded(content, decode, context), context)

        async def stream(contents: AsyncIterator[bytes], context: Context) -> Any:
            await self._admit(method, context)
            messages = (await _decoded(each, decode, context) async for each in contents)
            return await answer(messages, context)

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(call, None, handler.response_serializer)

    async def _admit(self, method: str, context: Context) -> None:
        try:
            if method not in _OPEN:
                self._check(method, context)
        except BatonError as refused:
            await context.abort_with_status(to_status(refused))

    def _check(self, method: str, context: Context) -> None:
        admin = caller_of(self._keys, context).admin
        if not admin and method.startswith(f"/{_ADMIN}/") and method not in _READ_ONLY:
            raise PermissionDenied("this needs an admin's API key")


async def _decoded(content: bytes, decode: Callable[[bytes], Any], context: Context) -> Any:
    try:
        return decode(content)
    except DecodeError:
        damaged = "the message cannot be decoded: it is damaged or of another type"
        await context.abort_with_status(to_status(InvalidRequest(damaged)))


GRPC_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Closes idle connections and detects dead peers.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    # Clients ping while they wait for a token.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Without this a second router could listen on the same port and take some of the calls.
    ("grpc.so_reuseport", 0),
]


def make_server(keys: KeyRing, max_requests: int) -> grpc.aio.Server:
    # More streams than may run, so that an excess call is refused instead of queued in its client.
    streams = ("grpc.max_concurrent_streams", 2 * max_requests + 100)
    return grpc.aio.server(options=[*GRPC_OPTIONS, streams], interceptors=[CallInterceptor(keys)])

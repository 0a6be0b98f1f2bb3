"""The gRPC servicers: Inference for users, Admin for operators."""

from __future__ import annotations

import dataclasses
import functools
import math
import time

from baton.core.errors import TokenOutOfRange, UnknownModel
from baton.core.types import Request
from baton.router.answers.answer_events import Started
from baton.router.edges.auth import Caller, KeyRing
from baton.router.edges.client_buffer import buffered
from baton.router.edges.grpc.interceptors import authorization, metadata_value
from baton.router.edges.grpc.protobuf import parse_prompt, parse_request, response
from baton.router.observe import time_breakdown
from baton.router.observe.ledger import RequestLedger
from baton.router.observe.overview import Overview
from baton.router.requests.serving import Serving
from baton.router.workers.controller_client import ControllerClient, switch_role
from baton.router.workers.membership import Membership
from baton.rpc.statuses import Context, abort, unary, unary_with_context
from baton.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc, timing_pb2, worker_pb2
from baton.v1 import inference_pb2 as pb


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(
        self,
        serving: Serving,
        membership: Membership,
        keys: KeyRing,
        model: str,
        reader_buffer: int,
    ) -> None:
        self._serving = serving
        self._keys = keys
        self._membership = membership
        self._model = model
        self._reader_buffer = reader_buffer

    async def Generate(  # type: ignore[override]
        self, message: pb.GenerateRequest, context: Context
    ) -> None:
        arrived = time.monotonic()
        try:
            self._check_model(message.model)
            caller = self._keys.caller(authorization(context.invocation_metadata() or ()))
            request = parse_request(message)
            left = context.time_remaining()
            request = dataclasses.replace(
                request,
                cache_salt=caller.salt(request.cache_salt),
                deadline=math.inf if left is None else arrived + left,
            )
            ledger = RequestLedger.begin(
                request.request_id,
                arrived,
                request.n,
                owner=caller.key.name,
                traceparent=metadata_value(context.invocation_metadata() or (), "traceparent"),
            )
            with caller.admit(request.n), self._serving.ledgers.keep(ledger):
                await self._answer(request, ledger, context)
                ledger.end()
                context.set_trailing_metadata(
                    ((time_breakdown.KEY, time_breakdown.trailer(ledger)),)
                )
        except Exception as error:  # noqa: BLE001 the edge of the process
            await abort(context, error)

    async def _answer(self, request: Request, ledger: RequestLedger, context: Context) -> None:
        generate = functools.partial(self._serving.generate, request, ledger)
        async with buffered(generate, self._reader_buffer) as buffer:
            async for event in buffer:
                began = time.monotonic()
                await context.write(response(event, self._model))
                if not isinstance(event, Started):
                    ledger.answers[event.index].write(began)

    @unary
    async def ListModels(self, message: pb.ListModelsRequest) -> pb.ListModelsResponse:
        text = self._serving.text
        model = pb.Model(
            name=self._model,
            context_length=self._membership.context_length(),
            vocabulary_size=text.vocabulary_size,
            has_chat_template=text.has_chat_template,
        )
        return pb.ListModelsResponse(models=[model])

    @unary
    async def Tokenize(self, message: pb.TokenizeRequest) -> pb.TokenizeResponse:
        self._check_model(message.model)
        tokens, rendered = await self._serving.tokenize(parse_prompt(message))
        return pb.TokenizeResponse(token_ids=tokens, rendered=rendered)

    @unary
    async def Detokenize(self, message: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        self._check_model(message.model)
        text = self._serving.text
        if any(token >= text.vocabulary_size for token in message.token_ids):
            raise TokenOutOfRange(
                f"token id {max(message.token_ids)} is outside the vocabulary of"
                f" {text.vocabulary_size}",
                field="token_ids",
            )
        tokens = list(message.token_ids)
        decoded = await self._serving.decode(tokens, message.keep_special_tokens)
        return pb.DetokenizeResponse(text=decoded)

    def _check_model(self, name: str) -> None:
        if name not in ("", self._model):
            raise UnknownModel(
                f"there is no model {name!r} here; this cluster serves {self._model!r}",
                field="model",
            )


class AdminService(cluster_pb2_grpc.AdminServicer):
    def __init__(
        self,
        overview: Overview,
        membership: Membership,
        controller: ControllerClient,
        keys: KeyRing,
    ) -> None:
        self._overview = overview
        self._membership = membership
        self._controller = controller
        self._keys = keys

    def _caller(self, context: Context) -> Caller:
        return self._keys.caller(authorization(context.invocation_metadata() or ()))

    @unary_with_context
    async def Status(
        self, message: cluster_pb2.StatusRequest, context: Context
    ) -> cluster_pb2.StatusResponse:
        everything = self._caller(context).admin
        return self._overview.status() if everything else self._overview.public_status()

    @unary
    async def Drain(self, message: cluster_pb2.DrainRequest) -> cluster_pb2.DrainResponse:
        link = self._membership.named(message.worker_id)
        drain = worker_pb2.Drain(restart=message.restart)
        link.send(worker_pb2.RouterMessage(drain=drain))
        return cluster_pb2.DrainResponse()

    @unary
    async def Scale(self, message: cluster_pb2.ScaleRequest) -> cluster_pb2.PoolsResponse:
        return await self._controller.scale(message)

    @unary
    async def Pools(self, message: cluster_pb2.PoolsRequest) -> cluster_pb2.PoolsResponse:
        return await self._controller.pools()

    @unary
    async def Plan(self, message: cluster_pb2.PlanRequest) -> cluster_pb2.PlanResponse:
        return await self._controller.plan()

    @unary
    async def SwitchRole(
        self, message: cluster_pb2.SwitchRoleRequest
    ) -> cluster_pb2.SwitchRoleResponse:
        return await switch_role(self._membership, self._controller, message)

    @unary_with_context
    async def Timing(
        self, message: cluster_pb2.TimingRequest, context: Context
    ) -> timing_pb2.RequestTiming:
        return self._overview.timing(message.request_id, self._caller(context))

    @unary
    async def Recent(self, message: cluster_pb2.RecentRequest) -> cluster_pb2.RecentResponse:
        return cluster_pb2.RecentResponse(requests=self._overview.recent(message.limit))

    @unary
    async def Diagnose(self, message: cluster_pb2.DiagnoseRequest) -> cluster_pb2.Diagnosis:
        return self._overview.diagnosis()

    @unary
    async def Trends(self, message: cluster_pb2.TrendsRequest) -> cluster_pb2.TrendsResponse:
        return self._overview.trends()

"""The gRPC front door: Inference for users, Admin for operators."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc

from baton.core.errors import (
    BatonError,
    Internal,
    TokenOutOfRange,
    UnknownModel,
    translation,
)
from baton.core.types import Request
from baton.core.wire import finish_to
from baton.router.answers.answer_events import (
    AnswerDelta,
    AnswerEvent,
    ScoredToken,
    Started,
    TokenScore,
)
from baton.router.edges.callers import Caller, KeyRing
from baton.router.edges.grpc.grpc_errors import to_status
from baton.router.edges.grpc.grpc_lock import authorization, metadata_value
from baton.router.edges.grpc.parse import parse_prompt, parse_request
from baton.router.edges.public import scrubbed, told
from baton.router.edges.reader import reading
from baton.router.observe import time_breakdown
from baton.router.observe.ledger import RequestLedger
from baton.router.observe.overview import Overview
from baton.router.placement.placement import Placement
from baton.router.requests.serving import Serving
from baton.router.workers.controller_client import ControllerClient, switch_role
from baton.router.workers.membership import Membership
from baton.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    inference_pb2_grpc,
    timing_pb2,
    worker_pb2,
)
from baton.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Service = TypeVar("Service")
Message = TypeVar("Message")
Answer = TypeVar("Answer")


async def abort(context: Context, error: Exception) -> NoReturn:
    """Ends a call with a typed error; what we did not foresee is logged and told as Internal."""
    if not isinstance(error, BatonError):
        log.error("a request failed unexpectedly", exc_info=error)
        error = Internal("the router failed; its log has the details")
    elif translation(error).http >= 500:
        log.warning("a request failed: %s: %s", error.reason, error.message)
    await context.abort_with_status(to_status(told(error)))
    raise AssertionError("abort_with_status returned")


def answered_in(
    method: Callable[[Service, Message, Context], Awaitable[Answer]],
) -> Callable[[Service, Message, Context], Awaitable[Answer]]:
    """A unary method whose errors become gRPC statuses."""

    @functools.wraps(method)
    async def call(self: Service, message: Message, context: Context) -> Answer:
        try:
            return await method(self, message, context)
        except Exception as error:  # noqa: BLE001 the edge of the process
            await abort(context, error)

    return call


def answered(
    method: Callable[[Service, Message], Awaitable[Answer]],
) -> Callable[[Service, Message, Context], Awaitable[Answer]]:
    """The same for one that does not ask who calls."""

    @answered_in
    @functools.wraps(method)
    async def call(self: Service, message: Message, context: Context) -> Answer:
        return await method(self, message)

    return call


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
                cache_salt=caller.salted(request.cache_salt),
                deadline=math.inf if left is None else arrived + left,
            )
            ledger = RequestLedger.begin(
                request.request_id,
                arrived,
                request.n,
                owner=caller.key.name,
                traceparent=metadata_value(context.invocation_metadata() or (), "traceparent"),
            )
            with caller.admitted(request.n), self._serving.ledgers.keep(ledger):
                await self._answer(request, ledger, context)
                ledger.end()
                context.set_trailing_metadata(
                    ((time_breakdown.KEY, time_breakdown.trailer(ledger)),)
                )
        except Exception as error:  # noqa: BLE001 the edge of the process
            await abort(context, error)

    async def _answer(self, request: Request, ledger: RequestLedger, context: Context) -> None:
        make = functools.partial(self._serving.generate, request, ledger)
        async with reading(make, self._reader_buffer) as buffer:
            async for event in buffer:
                began = time.monotonic()
                await context.write(self._response(event))
                if not isinstance(event, Started):
                    ledger.answers[event.index].write(began)

    @answered
    async def ListModels(self, message: pb.ListModelsRequest) -> pb.ListModelsResponse:
        text = self._serving.text
        model = pb.Model(
            name=self._model,
            context_length=self._membership.context_length(),
            vocabulary_size=text.vocabulary_size,
            has_chat_template=text.has_chat_template,
        )
        return pb.ListModelsResponse(models=[model])

    @answered
    async def Tokenize(self, message: pb.TokenizeRequest) -> pb.TokenizeResponse:
        self._check_model(message.model)
        tokens, rendered = await self._serving.tokenize(parse_prompt(message))
        return pb.TokenizeResponse(token_ids=tokens, rendered=rendered)

    @answered
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

    def _response(self, event: AnswerEvent) -> pb.GenerateResponse:
        if isinstance(event, AnswerDelta):
            return _delta_response(event)
        if isinstance(event, Started):
            return pb.GenerateResponse(
                started=pb.Started(
                    request_id=event.request_id,
                    model=self._model,
                    prompt_tokens=event.prompt_tokens,
                    prefill_worker=event.prefill_worker,
                    decode_worker=event.decode_worker,
                    seed=event.seed,
                    n=event.answers,
                )
            )
        usage = pb.Usage(
            prompt_tokens=event.prompt_tokens,
            completion_tokens=event.completion_tokens,
            cached_tokens=event.cached_tokens,
            fetched_tokens=event.fetched_tokens,
        )
        return pb.GenerateResponse(
            finished=pb.Finished(
                finish_reason=finish_to(event.reason),
                usage=usage,
                stop=event.stop,
                placements=[_placement(item) for item in event.placements],
                index=event.index,
                seed=event.seed,
            )
        )


def _delta_response(event: AnswerDelta) -> pb.GenerateResponse:
    """Made for each token: what is set field by field is made in a third of the time."""
    response = pb.GenerateResponse()
    delta = response.delta
    delta.text = event.text
    delta.token_ids.extend(event.token_ids)
    delta.index = event.index
    delta.reasoning = event.reasoning
    # Asking for a list makes one.
    if event.logprobs:
        delta.logprobs.extend(map(_scored, event.logprobs))
    for piece in event.tool_calls:
        delta.tool_calls.add(
            index=piece.index, id=piece.id, name=piece.name, arguments=piece.arguments
        )
    if event.prompt_logprobs:
        delta.prompt_logprobs.extend(map(_scored, event.prompt_logprobs[1:]))
    return response


def _scored(token: ScoredToken) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(chosen=_score(token.chosen), top=map(_score, token.top))


def _score(score: TokenScore) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=score.token_id, text=score.data, logprob=score.logprob or 0.0)


def _placement(placement: Placement) -> pb.Placement:
    forecast = placement.forecast
    return pb.Placement(
        prefill_worker=placement.prefill,
        decode_worker=placement.decode,
        policy=placement.policy.value,
        reason=scrubbed(placement.explanation),
        reason_code=placement.code.value,
        predicted_seconds=forecast.first_token_seconds if forecast else 0.0,
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

    @answered_in
    async def Status(
        self, message: cluster_pb2.StatusRequest, context: Context
    ) -> cluster_pb2.StatusResponse:
        everything = self._caller(context).admin
        return self._overview.status() if everything else self._overview.public_status()

    @answered
    async def Drain(self, message: cluster_pb2.DrainRequest) -> cluster_pb2.DrainResponse:
        link = self._membership.named(message.worker_id)
        drain = worker_pb2.Drain(restart=message.restart)
        link.send(worker_pb2.RouterMessage(drain=drain))
        return cluster_pb2.DrainResponse()

    @answered
    async def Scale(self, message: cluster_pb2.ScaleRequest) -> cluster_pb2.PoolsResponse:
        return await self._controller.scale(message)

    @answered
    async def Pools(self, message: cluster_pb2.PoolsRequest) -> cluster_pb2.PoolsResponse:
        return await self._controller.pools()

    @answered
    async def Plan(self, message: cluster_pb2.PlanRequest) -> cluster_pb2.PlanResponse:
        return await self._controller.plan()

    @answered
    async def SwitchRole(
        self, message: cluster_pb2.SwitchRoleRequest
    ) -> cluster_pb2.SwitchRoleResponse:
        return await switch_role(self._membership, self._controller, message)

    @answered_in
    async def Timing(
        self, message: cluster_pb2.TimingRequest, context: Context
    ) -> timing_pb2.RequestTiming:
        return self._overview.timing(message.request_id, self._caller(context))

    @answered
    async def Recent(self, message: cluster_pb2.RecentRequest) -> cluster_pb2.RecentResponse:
        return cluster_pb2.RecentResponse(requests=self._overview.recent(message.limit))

    @answered
    async def Diagnose(self, message: cluster_pb2.DiagnoseRequest) -> cluster_pb2.Diagnosis:
        return self._overview.diagnosis()

    @answered
    async def Trends(self, message: cluster_pb2.TrendsRequest) -> cluster_pb2.TrendsResponse:
        return self._overview.trends()

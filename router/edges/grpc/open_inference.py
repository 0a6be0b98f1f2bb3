"""The Open Inference Protocol (KServe v2), as clients of Triton speak it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from baton import __version__
from baton.core.errors import InvalidRequest, UnknownModel
from baton.router.answers.answer_events import AnswerDelta, AnswerEvent
from baton.router.edges.edge_context import EdgeContext
from baton.router.edges.grpc.open_tensors import INPUTS, OUTPUTS, InferCall, add_output
from baton.router.edges.grpc.servicers import caller_of, prepare
from baton.router.served_models import ServedModel
from baton.rpc import Context, public_error, unary
from baton.v1 import inference_pb2 as pb
from baton.v1 import open_inference_pb2 as oip
from baton.v1 import open_inference_pb2_grpc as service

NAME = "baton"
VERSION = "1"
STREAM_REQUESTS = 128
"""Requests of one stream that run at once. The next one is read when one has ended."""

Write = Callable[[oip.ModelInferResponse], Awaitable[None]]


class OpenInferenceService(service.GRPCInferenceServiceServicer):
    def __init__(self, context: EdgeContext) -> None:
        self._context = context

    @unary
    async def ServerLive(self, message: oip.ServerLiveRequest) -> oip.ServerLiveResponse:
        return oip.ServerLiveResponse(live=True)

    @unary
    async def ServerReady(self, message: oip.ServerReadyRequest) -> oip.ServerReadyResponse:
        ready = self._context.can_place and not self._context.activity.draining
        return oip.ServerReadyResponse(ready=ready)

    @unary
    async def ModelReady(
        self, message: oip.ModelReadyRequest, context: Context
    ) -> oip.ModelReadyResponse:
        model = self._check(message.name, message.version, context)
        ready = model.serving.placer.can_place and not self._context.activity.draining
        return oip.ModelReadyResponse(ready=ready)

    @unary
    async def ServerMetadata(
        self, message: oip.ServerMetadataRequest
    ) -> oip.ServerMetadataResponse:
        return oip.ServerMetadataResponse(name=NAME, version=__version__)

    @unary
    async def ModelMetadata(
        self, message: oip.ModelMetadataRequest, context: Context
    ) -> oip.ModelMetadataResponse:
        model = self._check(message.name, message.version, context)
        tensor = oip.ModelMetadataResponse.TensorMetadata
        return oip.ModelMetadataResponse(
            name=message.name or model.name,
            versions=[VERSION],
            platform=NAME,
            inputs=[tensor(name=name, datatype=kind, shape=[1]) for name, kind in INPUTS.items()],
            outputs=[
                tensor(name=name, datatype=kind, shape=[-1]) for name, kind in OUTPUTS.items()
            ],
        )

    @unary
    async def ModelInfer(
        self, message: oip.ModelInferRequest, context: Context
    ) -> oip.ModelInferResponse:
        sent: list[oip.ModelInferResponse] = []

        async def write(response: oip.ModelInferResponse) -> None:
            sent.append(response)

        await self._answer(message, context, write, streams=False)
        return sent[0]

    async def ModelStreamInfer(  # type: ignore[override]
        self, messages: AsyncIterator[oip.ModelInferRequest], context: Context
    ) -> None:
        """Runs the stream's requests concurrently. An error ends only its own request, as the
        protocol specifies."""
        writing, running = asyncio.Lock(), asyncio.Semaphore(STREAM_REQUESTS)

        async def write(response: oip.ModelInferResponse, error: str = "") -> None:
            async with writing:
                message = oip.ModelStreamInferResponse(error_message=error, infer_response=response)
                await context.write(message)

        async def run(message: oip.ModelInferRequest) -> None:
            try:
                await self._answer(message, context, write, streams=True)
            except Exception as error:  # noqa: BLE001 the edge of the process
                await write(oip.ModelInferResponse(id=message.id), public_error(error).message)
            finally:
                running.release()

        async with asyncio.TaskGroup() as requests:
            async for message in messages:
                await running.acquire()
                requests.create_task(run(message))

    def _check(self, name: str, version: str, context: Context) -> ServedModel:
        model = self._context.find_generating(name, caller_of(self._context.keys, context))
        if version not in ("", VERSION):
            raise UnknownModel(f"there is no version {version!r} of the model", field="version")
        return model

    async def _answer(
        self, message: oip.ModelInferRequest, context: Context, write: Write, *, streams: bool
    ) -> None:
        arrived = time.monotonic()
        self._check(message.model_name, message.model_version, context)
        call = InferCall.parse(message)
        if call.stream and not streams:
            raise InvalidRequest("a stream needs ModelStreamInfer", field="stream")
        call.message.model = message.model_name
        prepared = prepare(self._context, call.message, context, arrived)
        (request,), ledger = prepared.requests, prepared.ledger
        renderer = ResponseRenderer(call, request.model, message.id, request.n)
        with self._context.admit(prepared):
            async with self._context.answers(prepared) as events:
                async for event in events:
                    renderer.add(event)
                    if not isinstance(event, pb.Started) and (response := renderer.next()):
                        began = time.monotonic()
                        await write(response)
                        for answer in ledger.answers:
                            answer.write(began)


class ResponseRenderer:
    """Renders a call's responses: one per event of a stream, else one for all answers."""

    def __init__(self, call: InferCall, model: str, identity: str, answers: int) -> None:
        self._call, self._model, self._id = call, model, identity
        self._texts = [call.prefix] * answers
        self._tokens, self._reasons = [0] * answers, [""] * answers
        self._prompt_tokens, self._left = 0, answers

    def add(self, event: AnswerEvent) -> None:
        if isinstance(event, pb.Started):
            self._prompt_tokens = event.prompt_tokens
        elif isinstance(event, AnswerDelta):
            # A reasoning model's reasoning is text here too: there is no other output for it.
            self._texts[event.index] += event.reasoning + event.text
            self._tokens[event.index] += len(event.token_ids)
        else:
            reason = pb.FinishReason.Name(event.finish_reason)
            self._reasons[event.index] = reason.removeprefix("FINISH_REASON_").lower()
            self._left -= 1

    def next(self) -> oip.ModelInferResponse | None:
        """The next response, or None if it needs more events."""
        if self._left and not self._call.stream:
            return None
        response = oip.ModelInferResponse(
            model_name=self._model, model_version=VERSION, id=self._id
        )
        response.parameters["triton_final_response"].bool_param = not self._left
        outputs: dict[str, Sequence[object]] = {
            "text_output": [text.encode() for text in self._texts],
            "finish_reason": [reason.encode() for reason in self._reasons],
            "num_input_tokens": [self._prompt_tokens],
            "num_output_tokens": self._tokens,
        }
        for name in [name for name in outputs if name in self._call.outputs]:
            add_output(response, name, outputs[name], self._call.raw)
        if self._call.stream:
            self._texts, self._tokens = [""], [0]
        return response

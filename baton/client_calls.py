"""Every call of the API, written once as a coroutine for both clients.

The asyncio client returns these coroutines. In the blocking client, everything they await blocks
the thread instead of suspending, so a coroutine runs to its end at once.
"""

# A timeout becomes gRPC's deadline, which the router sees, unlike asyncio.timeout.
# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
import copy
import os
import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    TypeVar,
    Unpack,
)

from google.protobuf.message import Message

from baton.connection import (
    CALL_SECONDS,
    CHANNEL_OPTIONS,
    DEFAULT_ADDRESS,
    POLL_SECONDS,
    check_address,
    deadline_seconds,
    tls_credentials,
    translated,
    why_not_ready,
    with_key,
)
from baton.core.errors import DeadlineExceeded, Unavailable
from baton.request_builder import (
    GenerateOptions,
    MessageLike,
    chat_request,
    detokenize_request,
    embed_request,
    generate_request,
    role_request,
    tokenize_request,
    values_checked,
)
from baton.responses import Answer, AnswerBuilder
from baton.stream_calls import StreamCalls, shared
from baton.v1 import cluster_pb2, inference_pb2, timing_pb2
from baton.v1.cluster_pb2_grpc import AdminStub
from baton.v1.inference_pb2_grpc import InferenceStub

ADAPTER_SECONDS = 120.0
"""Timeout for workers to load an adapter, or for its requests to end."""

if TYPE_CHECKING:
    from grpc import UnaryUnaryMultiCallable as Method

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Timeout = float | None
StreamType = TypeVar("StreamType", bound=StreamCalls)


class ClientCalls(Generic[StreamType]):
    """A connection to a Baton router. Every call raises a BatonError when it fails."""

    BLOCKING: ClassVar[bool]
    LIBRARY: ClassVar[Any]  # grpc or grpc.aio
    STREAM: type[StreamType]
    _closed = False

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        tls: str | Path | None = None,
    ) -> None:
        """By default, `api_key` is the environment's BATON_API_KEY, and `tls`, a folder of
        certificates (see `baton certs`), its BATON_TLS."""
        self.address = check_address(address)
        self._api_key = api_key
        self._credentials = tls_credentials(tls)
        self._process = os.getpid()
        if self.BLOCKING:
            _ = self._stubs  # before threads share them

    @cached_property
    def _channel(self) -> Any:
        # A channel of grpc.aio belongs to the loop that runs when it is created.
        if self._credentials is None:
            return self.LIBRARY.insecure_channel(self.address, CHANNEL_OPTIONS)
        return self.LIBRARY.secure_channel(self.address, self._credentials, CHANNEL_OPTIONS)

    @cached_property
    def _stubs(self) -> tuple[InferenceStub, AdminStub]:
        channel = with_key(self._channel, self._api_key)
        return InferenceStub(channel), AdminStub(channel)

    @property
    def _inference(self) -> InferenceStub:
        self._check_open()
        return self._stubs[0]

    @property
    def _admin(self) -> AdminStub:
        self._check_open()
        return self._stubs[1]

    def _check_open(self) -> None:
        """Raises Unavailable where gRPC would end the process, or wait for ever."""
        if self._closed:
            raise Unavailable("this client is closed")
        if self._process != os.getpid():
            raise Unavailable("this client was made before a fork; make one in this process")

    def _stream(
        self,
        request: inference_pb2.GenerateRequest,
        timeout: Timeout,
        builder: AnswerBuilder | None = None,
    ) -> StreamType:
        """`builder` holds the part of the answer received so far."""
        with translated(self.address):
            call = self._inference.Generate(request, timeout=deadline_seconds(timeout))
        return self.STREAM(call, self.address, request, builder or AnswerBuilder())

    async def _call(
        self, method: Method[Request, Response], request: Request, timeout: Timeout
    ) -> Response:
        with translated(self.address):
            response: Any = method(request, timeout=deadline_seconds(timeout))
            done: Response = response if self.BLOCKING else await response
            return done

    async def _whole(self, stream: StreamType) -> Answer:
        try:
            return await stream._read()
        finally:
            stream.cancel()

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> StreamType:
        """Continues text, or token ids, delta by delta."""
        return self._stream(generate_request(prompt, options), options.get("timeout"))

    def stream_chat(
        self, messages: Iterable[MessageLike], **options: Unpack[GenerateOptions]
    ) -> StreamType:
        """Answers a conversation delta by delta."""
        return self._stream(chat_request(messages, options), options.get("timeout"))

    def resume(self, stream: StreamType, *, timeout: Timeout = None) -> StreamType:
        """Continues an answer whose stream broke, after its last received token. Any router of the
        cluster can do this. The new stream's `answer` is the whole answer."""
        # A copy, since the old stream may be read on.
        return self._stream(stream._resumed(), timeout, copy.deepcopy(stream._builder))

    @shared
    async def generate(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Answer:
        """Continues text, or token ids, and waits for the whole answer."""
        return await self._whole(self.stream(prompt, **options))

    @shared
    async def chat(
        self, messages: Iterable[MessageLike], **options: Unpack[GenerateOptions]
    ) -> Answer:
        """Answers a conversation, and waits for the whole answer."""
        return await self._whole(self.stream_chat(messages, **options))

    @shared
    async def models(self, *, timeout: Timeout = CALL_SECONDS) -> list[inference_pb2.Model]:
        """The models that the cluster serves."""
        request = inference_pb2.ListModelsRequest()
        return list((await self._call(self._inference.ListModels, request, timeout)).models)

    @shared
    async def add_adapter(
        self, name: str, folder: str, *, model: str = "", timeout: Timeout = ADAPTER_SECONDS
    ) -> bytes:
        """Serves a LoRA adapter under a name; returns its digest. `folder` is a PEFT folder or a
        hub's repository (org/name@revision). `model` is its base, required if several are served.
        For admins."""
        request = cluster_pb2.AddAdapterRequest(name=name, folder=folder, model=model)
        return (await self._call(self._admin.AddAdapter, request, timeout)).digest

    @shared
    async def remove_adapter(self, name: str, *, timeout: Timeout = ADAPTER_SECONDS) -> None:
        """Removes an adapter; waits for its requests. For admins."""
        request = cluster_pb2.RemoveAdapterRequest(name=name)
        await self._call(self._admin.RemoveAdapter, request, timeout)

    @shared
    async def add_model(self, name: str, keys: str, *, timeout: Timeout = ADAPTER_SECONDS) -> None:
        """Serves a further model; `pools` reports its workers' progress. `keys` are configuration
        keys as JSON, such as '{"model": "org/name"}'. For admins."""
        request = cluster_pb2.NamedModel(name=name, keys=keys)
        await self._call(self._admin.AddModel, request, timeout)

    @shared
    async def remove_model(self, name: str, *, timeout: Timeout = CALL_SECONDS) -> None:
        """Removes a model; its workers end after its last request. For admins."""
        request = cluster_pb2.RemoveModelRequest(name=name)
        await self._call(self._admin.RemoveModel, request, timeout)

    @shared
    async def tokenize(
        self,
        prompt: str | Iterable[MessageLike],
        *,
        model: str = "",
        timeout: Timeout = CALL_SECONDS,
    ) -> inference_pb2.TokenizeResponse:
        """The `token_ids` of text or of a conversation, and a conversation's `rendered` text."""
        request = tokenize_request(prompt, model)
        return await self._call(self._inference.Tokenize, request, timeout)

    @shared
    async def detokenize(
        self,
        token_ids: Iterable[int],
        *,
        keep_special_tokens: bool = False,
        model: str = "",
        timeout: Timeout = CALL_SECONDS,
    ) -> str:
        """The text of token ids."""
        request = detokenize_request(token_ids, keep_special_tokens, model)
        return (await self._call(self._inference.Detokenize, request, timeout)).text

    @shared
    async def status(self, *, timeout: Timeout = CALL_SECONDS) -> cluster_pb2.StatusResponse:
        """The router's view of the cluster now."""
        return await self._call(self._admin.Status, cluster_pb2.StatusRequest(), timeout)

    @shared
    async def timing(
        self, request_id: str, *, timeout: Timeout = CALL_SECONDS
    ) -> timing_pb2.RequestTiming:
        """The time breakdown of a recent request."""
        request = cluster_pb2.TimingRequest(request_id=request_id)
        return await self._call(self._admin.Timing, request, timeout)

    @shared
    async def recent(
        self, limit: int = 0, *, timeout: Timeout = CALL_SECONDS
    ) -> list[timing_pb2.RequestTiming]:
        """The latest requests, newest first, without their phases."""
        with values_checked():
            request = cluster_pb2.RecentRequest(limit=limit)
        return list((await self._call(self._admin.Recent, request, timeout)).requests)

    @shared
    async def diagnose(
        self, *, model: str = "", timeout: Timeout = CALL_SECONDS
    ) -> cluster_pb2.Diagnosis:
        """The bottleneck of a model, or of the busiest, and what to change."""
        request = cluster_pb2.DiagnoseRequest(model=model)
        return await self._call(self._admin.Diagnose, request, timeout)

    @shared
    async def trends(
        self, *, model: str = "", timeout: Timeout = CALL_SECONDS
    ) -> cluster_pb2.TrendsResponse:
        """The last minutes of a model, or of the busiest, in steps of a few seconds."""
        request = cluster_pb2.TrendsRequest(model=model)
        return await self._call(self._admin.Trends, request, timeout)

    @shared
    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        model: str = "",
        pooling: Literal["last", "mean"] | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        priority: int = 0,
        timeout: Timeout = None,
    ) -> list[list[float]]:
        """The vector of each text or list of token ids."""
        request = embed_request(
            inputs, model, pooling, dimensions, normalize=normalize, priority=priority
        )
        answer = await self._call(self._inference.Embed, request, timeout)
        return [list(each.values) for each in answer.embeddings]

    @shared
    async def clear_responses(
        self, tenant: str | None = None, *, timeout: Timeout = CALL_SECONDS
    ) -> int:
        """Deletes the cached responses of an API key (by name), or all. Returns how many."""
        request = cluster_pb2.ClearResponsesRequest(tenant=tenant)
        return (await self._call(self._admin.ClearResponses, request, timeout)).responses

    @shared
    async def semantic_report(
        self,
        false_hit_rate: float = 0.01,
        same_answer: float = 0.9,
        *,
        timeout: Timeout = CALL_SECONDS,
    ) -> cluster_pb2.SemanticReportResponse:
        """Reports what the semantic cache would have answered (`cache.semantic: shadow`). A hit is
        false if its answer is less similar to the computed one than `same_answer`."""
        request = cluster_pb2.SemanticReportRequest(
            false_hit_rate=false_hit_rate, same_answer=same_answer
        )
        return await self._call(self._admin.SemanticReport, request, timeout)

    @shared
    async def drain(
        self, worker_id: str, *, restart: bool = False, timeout: Timeout = CALL_SECONDS
    ) -> None:
        """Makes a worker accept nothing new, finish or migrate its requests, and exit.

        With `restart` a new process replaces it, if something restarts workers.
        """
        request = cluster_pb2.DrainRequest(worker_id=worker_id, restart=restart)
        await self._call(self._admin.Drain, request, timeout)

    @shared
    async def scale(
        self,
        prefill: int | None = None,
        decode: int | None = None,
        *,
        model: str = "",
        timeout: Timeout = CALL_SECONDS,
    ) -> cluster_pb2.PoolsResponse:
        """Sets the wanted number of a model's workers (None: unchanged); `pools` reports the
        progress."""
        with values_checked():
            request = cluster_pb2.ScaleRequest(prefill=prefill, decode=decode, model=model)
        return await self._call(self._admin.Scale, request, timeout)

    @shared
    async def pools(self, *, timeout: Timeout = CALL_SECONDS) -> cluster_pb2.PoolsResponse:
        """The wanted number of workers, and the progress of each."""
        return await self._call(self._admin.Pools, cluster_pb2.PoolsRequest(), timeout)

    @shared
    async def plan(
        self, *, model: str = "", timeout: Timeout = CALL_SECONDS
    ) -> cluster_pb2.PlanResponse:
        """The latest decisions of a model's planner, with reasons."""
        request = cluster_pb2.PlanRequest(model=model)
        return await self._call(self._admin.Plan, request, timeout)

    @shared
    async def switch_role(
        self, worker_id: str, role: str, *, timeout: Timeout = None
    ) -> cluster_pb2.SwitchRoleResponse:
        """Makes a worker finish or migrate its requests, and continue in another role."""
        return await self._call(self._admin.SwitchRole, role_request(worker_id, role), timeout)

    @shared
    async def wait_ready(self, timeout: float = 60.0) -> None:
        """Waits until the cluster can answer; DeadlineExceeded says what is missing."""
        deadline = time.monotonic() + timeout
        while missing := await self._missing(max(deadline - time.monotonic(), POLL_SECONDS)):
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"not ready after {timeout:g} s: {missing}")
            if self.BLOCKING:
                time.sleep(POLL_SECONDS)  # noqa: ASYNC251
            else:
                await asyncio.sleep(POLL_SECONDS)

    async def _missing(self, seconds: float) -> str:
        method = self._admin.Status
        try:
            return why_not_ready(await self._call(method, cluster_pb2.StatusRequest(), seconds))
        except (Unavailable, DeadlineExceeded) as error:
            return error.message

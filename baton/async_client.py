"""The client for asyncio. baton/client.py is its twin for plain Python."""

# A timeout is gRPC's deadline, which the router sees; asyncio.timeout would keep it here.
# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import grpc.aio

from baton.client_errors import translated
from baton.connection import (
    CALL_SECONDS,
    CHANNEL_OPTIONS,
    DEFAULT_ADDRESS,
    POLL_SECONDS,
    tls_credentials,
    why_not_ready,
    with_key,
)
from baton.core.errors import Cancelled, DeadlineExceeded, Unavailable
from baton.request_builder import (
    GenerateOptions,
    MessageLike,
    chat_request,
    detokenize_request,
    generate_request,
    role_request,
    tokenize_request,
)
from baton.responses import Answer, AnswerBuilder, Delta
from baton.timing import timing_of
from baton.v1 import cluster_pb2, inference_pb2, timing_pb2
from baton.v1.cluster_pb2_grpc import AdminStub
from baton.v1.inference_pb2_grpc import InferenceStub

if TYPE_CHECKING:
    from baton.v1.cluster_pb2_grpc import AdminAsyncStub
    from baton.v1.inference_pb2_grpc import InferenceAsyncStub

    GenerateCall = grpc.aio.UnaryStreamCall[
        inference_pb2.GenerateRequest, inference_pb2.GenerateResponse
    ]


class AsyncStream:
    """An answer as it is written: iterate for its Deltas, then take `answer`.

    Of several answers the Deltas alternate as they come; `index` tells them apart.

    Leaving its `async with` block early, or cancelling the task that iterates,
    cancels the request on every worker.
    """

    def __init__(self, call: GenerateCall, address: str) -> None:
        self._call = call
        self._address = address
        self._builder = AnswerBuilder()
        self._cancelled = False

    @property
    def answer(self) -> Answer:
        """The whole answer, once the iteration has ended."""
        if not self._builder.complete:
            raise RuntimeError("the answer is not complete; iterate to its end first")
        return self._builder.answer()

    async def timing(self) -> timing_pb2.RequestTiming:
        """Where the time went, once the iteration has ended."""
        return timing_of(await self._call.trailing_metadata())

    async def read(self) -> Answer:
        """Reads what is left and gives the whole answer."""
        async for _ in self:
            pass
        return self.answer

    def cancel(self) -> None:
        """Stops the request. Who iterates sees Cancelled."""
        self._cancelled = True
        self._call.cancel()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        try:
            with translated(self._address):
                return await self._next()
        except asyncio.CancelledError:
            # gRPC raises this for a cancelled call too; only a task's own may pass as such.
            if self._cancelled and not _task_is_cancelled():
                raise Cancelled("the call was cancelled") from None
            raise

    async def _next(self) -> Delta:
        async for response in self._call:
            delta = self._builder.add(response)
            if delta is not None:
                return delta
        self._builder.answer()
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncClient:
    """A connection to a Baton router, for the one event loop that first uses it.

    Every call raises a BatonError when it fails.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        tls: str | Path | None = None,
    ) -> None:
        """Where they are not given, `api_key` is the environment's BATON_API_KEY, and `tls`, a
        folder of certificates (see `baton certs`), its BATON_TLS."""
        self.address = address
        self._api_key = api_key
        self._credentials = tls_credentials(tls)

    async def generate(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Answer:
        """Continues text, or token ids, and waits for the whole answer."""
        async with self.stream(prompt, **options) as stream:
            return await stream.read()

    async def chat(
        self, messages: Iterable[MessageLike], **options: Unpack[GenerateOptions]
    ) -> Answer:
        """Answers a conversation, and waits for the whole answer."""
        async with self.stream_chat(messages, **options) as stream:
            return await stream.read()

    def stream(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> AsyncStream:
        """Continues text, or token ids, piece by piece."""
        return self._start(generate_request(prompt, options), options.get("timeout"))

    def stream_chat(
        self, messages: Iterable[MessageLike], **options: Unpack[GenerateOptions]
    ) -> AsyncStream:
        """Answers a conversation piece by piece."""
        return self._start(chat_request(messages, options), options.get("timeout"))

    async def models(self, *, timeout: float | None = CALL_SECONDS) -> list[inference_pb2.Model]:
        """The models that the cluster serves."""
        with translated(self.address):
            request = inference_pb2.ListModelsRequest()
            return list((await self._inference.ListModels(request, timeout=timeout)).models)

    async def tokenize(
        self,
        prompt: str | Iterable[MessageLike],
        *,
        model: str = "",
        timeout: float | None = CALL_SECONDS,
    ) -> inference_pb2.TokenizeResponse:
        """The `token_ids` of text or of a conversation, and a conversation's `rendered` text."""
        request = tokenize_request(prompt, model)
        with translated(self.address):
            return await self._inference.Tokenize(request, timeout=timeout)

    async def detokenize(
        self,
        token_ids: Iterable[int],
        *,
        keep_special_tokens: bool = False,
        model: str = "",
        timeout: float | None = CALL_SECONDS,
    ) -> str:
        """The text of token ids."""
        request = detokenize_request(token_ids, keep_special_tokens, model)
        with translated(self.address):
            return (await self._inference.Detokenize(request, timeout=timeout)).text

    async def status(self, *, timeout: float | None = CALL_SECONDS) -> cluster_pb2.StatusResponse:
        """What the router knows of the cluster now."""
        with translated(self.address):
            return await self._admin.Status(cluster_pb2.StatusRequest(), timeout=timeout)

    async def timing(
        self, request_id: str, *, timeout: float | None = CALL_SECONDS
    ) -> timing_pb2.RequestTiming:
        """Where the time of a recent request went."""
        with translated(self.address):
            request = cluster_pb2.TimingRequest(request_id=request_id)
            return await self._admin.Timing(request, timeout=timeout)

    async def recent(
        self, limit: int = 0, *, timeout: float | None = CALL_SECONDS
    ) -> list[timing_pb2.RequestTiming]:
        """The latest requests, newest first, without their phases."""
        with translated(self.address):
            request = cluster_pb2.RecentRequest(limit=limit)
            return list((await self._admin.Recent(request, timeout=timeout)).requests)

    async def diagnose(self, *, timeout: float | None = CALL_SECONDS) -> cluster_pb2.Diagnosis:
        """What holds the cluster back, and what to change."""
        with translated(self.address):
            return await self._admin.Diagnose(cluster_pb2.DiagnoseRequest(), timeout=timeout)

    async def trends(self, *, timeout: float | None = CALL_SECONDS) -> cluster_pb2.TrendsResponse:
        """The last minutes, in steps of a few seconds."""
        with translated(self.address):
            return await self._admin.Trends(cluster_pb2.TrendsRequest(), timeout=timeout)

    async def drain(
        self, worker_id: str, *, restart: bool = False, timeout: float | None = CALL_SECONDS
    ) -> None:
        """Has a worker take nothing new, finish or hand back what runs, and exit.

        With `restart` a fresh process takes its place, where something starts workers again.
        """
        with translated(self.address):
            request = cluster_pb2.DrainRequest(worker_id=worker_id, restart=restart)
            await self._admin.Drain(request, timeout=timeout)

    async def scale(
        self,
        prefill: int | None = None,
        decode: int | None = None,
        *,
        timeout: float | None = CALL_SECONDS,
    ) -> cluster_pb2.PoolsResponse:
        """Has there be so many workers, as many as before where None; `pools` says how far
        that is."""
        with translated(self.address):
            request = cluster_pb2.ScaleRequest(prefill=prefill, decode=decode)
            return await self._admin.Scale(request, timeout=timeout)

    async def pools(self, *, timeout: float | None = CALL_SECONDS) -> cluster_pb2.PoolsResponse:
        """How many workers there are to be, and how far each is."""
        with translated(self.address):
            return await self._admin.Pools(cluster_pb2.PoolsRequest(), timeout=timeout)

    async def plan(self, *, timeout: float | None = CALL_SECONDS) -> cluster_pb2.PlanResponse:
        """What the planner has decided lately, and why."""
        with translated(self.address):
            return await self._admin.Plan(cluster_pb2.PlanRequest(), timeout=timeout)

    async def switch_role(
        self, worker_id: str, role: str, *, timeout: float | None = None
    ) -> cluster_pb2.SwitchRoleResponse:
        """Has a worker finish or hand back what runs, and go on in another role."""
        with translated(self.address):
            return await self._admin.SwitchRole(role_request(worker_id, role), timeout=timeout)

    async def wait_ready(self, timeout: float = 60.0) -> None:
        """Waits until the cluster can answer; DeadlineExceeded says what is missing."""
        deadline = time.monotonic() + timeout
        while missing := await self._missing(max(deadline - time.monotonic(), POLL_SECONDS)):
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"not ready after {timeout:g} s: {missing}")
            await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        """Closes the connection and cancels what still runs on it."""
        await self._channel.close()

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        # A channel belongs to the loop that runs when it is made.
        if self._credentials is None:
            return grpc.aio.insecure_channel(self.address, CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(self.address, self._credentials, CHANNEL_OPTIONS)

    @cached_property
    def _inference(self) -> InferenceAsyncStub:
        return InferenceStub(with_key(self._channel, self._api_key))

    @cached_property
    def _admin(self) -> AdminAsyncStub:
        return AdminStub(with_key(self._channel, self._api_key))

    def _start(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> AsyncStream:
        return AsyncStream(self._inference.Generate(request, timeout=timeout), self.address)

    async def _missing(self, timeout: float) -> str:
        try:
            return why_not_ready(await self.status(timeout=timeout))
        except (Unavailable, DeadlineExceeded) as error:
            return error.message

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

"""The client for plain Python. baton/async_client.py is its twin for asyncio."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, Unpack

import grpc

from baton.client_errors import from_rpc_error, translated
from baton.connection import (
    CALL_SECONDS,
    CHANNEL_OPTIONS,
    DEFAULT_ADDRESS,
    POLL_SECONDS,
    tls_credentials,
    why_not_ready,
    with_key,
)
from baton.core.errors import DeadlineExceeded, Unavailable
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
from baton.timing import Metadata, timing_of
from baton.v1 import cluster_pb2, inference_pb2, timing_pb2
from baton.v1.cluster_pb2_grpc import AdminStub
from baton.v1.inference_pb2_grpc import InferenceStub


class GenerateCall(Protocol):
    """A call under way, as gRPC makes it."""

    def __iter__(self) -> Iterator[inference_pb2.GenerateResponse]: ...
    def cancel(self) -> bool: ...
    def trailing_metadata(self) -> Metadata: ...


Arrivals = queue.SimpleQueue[inference_pb2.GenerateResponse | grpc.RpcError | None]
"""What a call brings: its messages, then its error, or None at a good end."""


def _pump(call: GenerateCall, arrivals: Arrivals) -> None:
    """Reads a call on a thread of its own.

    A KeyboardInterrupt inside gRPC can leave a lock held that all other calls
    of the channel need. A SimpleQueue can be interrupted anywhere.
    """
    try:
        for response in call:
            arrivals.put(response)
    except grpc.RpcError as error:
        arrivals.put(error)
    else:
        arrivals.put(None)


class Stream:
    """An answer as it is written: iterate for its Deltas, then take `answer`.

    Of several answers the Deltas alternate as they come; `index` tells them apart.

    Leaving its `with` block early cancels the request on every worker.
    """

    def __init__(self, call: GenerateCall, address: str) -> None:
        self._call = call
        self._address = address
        self._builder = AnswerBuilder()
        self._arrivals: Arrivals = queue.SimpleQueue()
        pump = threading.Thread(target=_pump, args=(call, self._arrivals), daemon=True)
        pump.start()
        # Who drops a stream without a word does not want it either.
        weakref.finalize(self, call.cancel)

    @property
    def answer(self) -> Answer:
        """The whole answer, once the iteration has ended."""
        if not self._builder.complete:
            raise RuntimeError("the answer is not complete; iterate to its end first")
        return self._builder.answer()

    @property
    def timing(self) -> timing_pb2.RequestTiming:
        """Where the time went, once the iteration has ended."""
        return timing_of(self._call.trailing_metadata())

    def read(self) -> Answer:
        """Reads what is left and gives the whole answer."""
        for _ in self:
            pass
        return self.answer

    def cancel(self) -> None:
        """Stops the request. From any thread; who iterates sees Cancelled."""
        self._call.cancel()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while isinstance(arrival := self._arrivals.get(), inference_pb2.GenerateResponse):
            delta = self._builder.add(arrival)
            if delta is not None:
                return delta
        self._arrivals.put(arrival)  # the end stays the end, however often one asks
        if arrival is not None:
            raise from_rpc_error(arrival, self._address) from arrival
        self._builder.answer()
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


class Client:
    """A connection to a Baton router. Threads may share one.

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
        self._channel = _open(address, tls_credentials(tls))
        keyed = with_key(self._channel, api_key)
        self._inference = InferenceStub(keyed)
        self._admin = AdminStub(keyed)

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Answer:
        """Continues text, or token ids, and waits for the whole answer."""
        with self.stream(prompt, **options) as stream:
            return stream.read()

    def chat(self, messages: Iterable[MessageLike], **options: Unpack[GenerateOptions]) -> Answer:
        """Answers a conversation, and waits for the whole answer."""
        with self.stream_chat(messages, **options) as stream:
            return stream.read()

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Stream:
        """Continues text, or token ids, piece by piece."""
        return self._start(generate_request(prompt, options), options.get("timeout"))

    def stream_chat(
        self, messages: Iterable[MessageLike], **options: Unpack[GenerateOptions]
    ) -> Stream:
        """Answers a conversation piece by piece."""
        return self._start(chat_request(messages, options), options.get("timeout"))

    def models(self, *, timeout: float | None = CALL_SECONDS) -> list[inference_pb2.Model]:
        """The models that the cluster serves."""
        with translated(self.address):
            request = inference_pb2.ListModelsRequest()
            return list(self._inference.ListModels(request, timeout=timeout).models)

    def tokenize(
        self,
        prompt: str | Iterable[MessageLike],
        *,
        model: str = "",
        timeout: float | None = CALL_SECONDS,
    ) -> inference_pb2.TokenizeResponse:
        """The `token_ids` of text or of a conversation, and a conversation's `rendered` text."""
        request = tokenize_request(prompt, model)
        with translated(self.address):
            return self._inference.Tokenize(request, timeout=timeout)

    def detokenize(
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
            return self._inference.Detokenize(request, timeout=timeout).text

    def status(self, *, timeout: float | None = CALL_SECONDS) -> cluster_pb2.StatusResponse:
        """What the router knows of the cluster now."""
        with translated(self.address):
            return self._admin.Status(cluster_pb2.StatusRequest(), timeout=timeout)

    def timing(
        self, request_id: str, *, timeout: float | None = CALL_SECONDS
    ) -> timing_pb2.RequestTiming:
        """Where the time of a recent request went."""
        with translated(self.address):
            request = cluster_pb2.TimingRequest(request_id=request_id)
            return self._admin.Timing(request, timeout=timeout)

    def recent(
        self, limit: int = 0, *, timeout: float | None = CALL_SECONDS
    ) -> list[timing_pb2.RequestTiming]:
        """The latest requests, newest first, without their phases."""
        with translated(self.address):
            request = cluster_pb2.RecentRequest(limit=limit)
            return list(self._admin.Recent(request, timeout=timeout).requests)

    def diagnose(self, *, timeout: float | None = CALL_SECONDS) -> cluster_pb2.Diagnosis:
        """What holds the cluster back, and what to change."""
        with translated(self.address):
            return self._admin.Diagnose(cluster_pb2.DiagnoseRequest(), timeout=timeout)

    def trends(self, *, timeout: float | None = CALL_SECONDS) -> cluster_pb2.TrendsResponse:
        """The last minutes, in steps of a few seconds."""
        with translated(self.address):
            return self._admin.Trends(cluster_pb2.TrendsRequest(), timeout=timeout)

    def drain(
        self, worker_id: str, *, restart: bool = False, timeout: float | None = CALL_SECONDS
    ) -> None:
        """Has a worker take nothing new, finish or hand back what runs, and exit.

        With `restart` a fresh process takes its place, where something starts workers again.
        """
        with translated(self.address):
            request = cluster_pb2.DrainRequest(worker_id=worker_id, restart=restart)
            self._admin.Drain(request, timeout=timeout)

    def scale(
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
            return self._admin.Scale(request, timeout=timeout)

    def pools(self, *, timeout: float | None = CALL_SECONDS) -> cluster_pb2.PoolsResponse:
        """How many workers there are to be, and how far each is."""
        with translated(self.address):
            return self._admin.Pools(cluster_pb2.PoolsRequest(), timeout=timeout)

    def plan(self, *, timeout: float | None = CALL_SECONDS) -> cluster_pb2.PlanResponse:
        """What the planner has decided lately, and why."""
        with translated(self.address):
            return self._admin.Plan(cluster_pb2.PlanRequest(), timeout=timeout)

    def switch_role(
        self, worker_id: str, role: str, *, timeout: float | None = None
    ) -> cluster_pb2.SwitchRoleResponse:
        """Has a worker finish or hand back what runs, and go on in another role."""
        with translated(self.address):
            return self._admin.SwitchRole(role_request(worker_id, role), timeout=timeout)

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Waits until the cluster can answer; DeadlineExceeded says what is missing."""
        deadline = time.monotonic() + timeout
        while missing := self._missing(max(deadline - time.monotonic(), POLL_SECONDS)):
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"not ready after {timeout:g} s: {missing}")
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Closes the connection and cancels what still runs on it."""
        self._channel.close()

    def _start(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Stream:
        return Stream(self._inference.Generate(request, timeout=timeout), self.address)

    def _missing(self, timeout: float) -> str:
        try:
            return why_not_ready(self.status(timeout=timeout))
        except (Unavailable, DeadlineExceeded) as error:
            return error.message

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _open(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(address, CHANNEL_OPTIONS)
    return grpc.secure_channel(address, credentials, CHANNEL_OPTIONS)

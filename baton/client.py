"""The two clients: `Client` blocks, `AsyncClient` is for asyncio."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar, Self

import grpc
import grpc.aio

from baton.client_calls import ClientCalls
from baton.connection import from_rpc_error, translated
from baton.core.errors import Cancelled
from baton.responses import AnswerBuilder, Delta, timing_of
from baton.stream_calls import StreamCalls, run_to_end
from baton.v1 import inference_pb2, timing_pb2

Arrivals = queue.SimpleQueue[inference_pb2.GenerateResponse | grpc.RpcError | None]
"""A call's messages, then its error, or None after a complete stream."""


def _pump(call: Any, arrivals: Arrivals) -> None:
    """Receives a call's messages on a thread of its own.

    A KeyboardInterrupt inside gRPC can leave a lock held that all other calls of the channel
    need. A SimpleQueue can be interrupted anywhere.
    """
    try:
        for response in call:
            arrivals.put(response)
    except grpc.RpcError as error:
        arrivals.put(error)
    else:
        arrivals.put(None)


class Stream(StreamCalls):
    """An answer as it is generated: iterate for its Deltas, then get `answer`.

    Deltas of several answers alternate as they arrive; `index` tells them apart. Leaving its
    `with` block early cancels the request on every worker. `cancel` works from any thread.
    """

    BLOCKING = True

    def __init__(
        self,
        call: Any,
        address: str,
        request: inference_pb2.GenerateRequest,
        builder: AnswerBuilder,
    ) -> None:
        super().__init__(call, address, request, builder)
        self._arrivals: Arrivals = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(call, self._arrivals), daemon=True).start()
        # A stream that is garbage-collected is cancelled too.
        weakref.finalize(self, call.cancel)

    @property
    def timing(self) -> timing_pb2.RequestTiming:
        """The time breakdown, once the iteration has ended."""
        return timing_of(self._call.trailing_metadata())

    async def _receive(self) -> inference_pb2.GenerateResponse | None:
        arrival = self._arrivals.get()
        if isinstance(arrival, inference_pb2.GenerateResponse):
            return arrival
        self._arrivals.put(arrival)  # for the next call, which ends the same way
        if arrival is None:
            return None
        raise from_rpc_error(arrival, self._address) from arrival

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        if (delta := run_to_end(self._next())) is None:
            raise StopIteration
        return delta

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()


class Client(ClientCalls[Stream]):
    """A connection to a Baton router. Threads may share one.

    Every call raises a BatonError when it fails.
    """

    BLOCKING = True
    LIBRARY: ClassVar = grpc
    STREAM = Stream

    def close(self) -> None:
        """Closes the connection and cancels its running calls."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncStream(StreamCalls):
    """An answer as it is generated: iterate for its Deltas, then get `answer`.

    Deltas of several answers alternate as they arrive; `index` tells them apart. Leaving its
    `async with` block early, or cancelling the task that iterates, cancels the request on every
    worker.
    """

    BLOCKING = False
    _cancelled = False

    async def timing(self) -> timing_pb2.RequestTiming:
        """The time breakdown, once the iteration has ended."""
        return timing_of(await self._call.trailing_metadata())

    def cancel(self) -> None:
        """Cancels the request; the iteration raises Cancelled."""
        self._cancelled = True
        super().cancel()

    async def _receive(self) -> inference_pb2.GenerateResponse | None:
        try:
            with translated(self._address):
                response = await self._call.read()
                return None if response is grpc.aio.EOF else response
        except asyncio.CancelledError:
            # gRPC raises this for a cancelled call too, which callers see as Cancelled.
            if self._cancelled and not _task_is_cancelled():
                raise Cancelled("the call was cancelled") from None
            raise

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if (delta := await self._next()) is None:
            raise StopAsyncIteration
        return delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.cancel()


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncClient(ClientCalls[AsyncStream]):
    """A connection to a Baton router, for the one event loop that first uses it.

    Every call raises a BatonError when it fails.
    """

    BLOCKING = False
    LIBRARY: ClassVar = grpc.aio
    STREAM = AsyncStream

    async def close(self) -> None:
        """Closes the connection and cancels its running calls."""
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

"""The base of both clients' streams, and the decorator that makes a coroutine method blocking."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Coroutine
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    ParamSpec,
    TypeVar,
    overload,
)

from baton.core.errors import InvalidRequest
from baton.responses import Answer, AnswerBuilder, Delta
from baton.v1 import inference_pb2

if TYPE_CHECKING:
    from baton.client import AsyncClient, AsyncStream, Client, Stream

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def run_to_end(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine that never suspends, and returns its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise RuntimeError("the coroutine has suspended")


class shared(Generic[Arguments, Result]):  # noqa: N801  (a decorator)
    """A coroutine method that runs to its end at once in blocking classes."""

    def __init__(
        self, method: Callable[Concatenate[Any, Arguments], Coroutine[Any, Any, Result]]
    ) -> None:
        self._method = method

    @overload
    def __get__(self, owner: Client | Stream, kind: object) -> Callable[Arguments, Result]: ...
    @overload
    def __get__(
        self, owner: AsyncClient | AsyncStream, kind: object
    ) -> Callable[Arguments, Coroutine[Any, Any, Result]]: ...
    def __get__(self, owner: Any, kind: object) -> Any:
        if owner is None:
            return self._method
        method = types.MethodType(self._method, owner)
        if not owner.BLOCKING:
            return method

        @functools.wraps(method)
        def blocking(*arguments: Arguments.args, **options: Arguments.kwargs) -> object:
            return run_to_end(method(*arguments, **options))

        return blocking


class StreamCalls:
    """An answer as it is generated: iterate for its Deltas, then get `answer`.

    Deltas of several answers alternate as they arrive; `index` tells them apart.
    """

    BLOCKING: ClassVar[bool]

    def __init__(
        self,
        call: Any,
        address: str,
        request: inference_pb2.GenerateRequest,
        builder: AnswerBuilder,
    ) -> None:
        self._call = call
        self._address = address
        self._request = request
        self._builder = builder

    @property
    def answer(self) -> Answer:
        """The whole answer, once the iteration has ended."""
        if not self._builder.complete:
            raise RuntimeError("the answer is not complete; iterate to its end first")
        return self._builder.answer()

    def cancel(self) -> None:
        """Cancels the request; the iteration raises Cancelled."""
        self._call.cancel()

    def _resumed(self) -> inference_pb2.GenerateRequest:
        """The request for the rest of the answer."""
        if self._request.n > 1:
            raise InvalidRequest("a stream of several answers cannot be resumed", field="n")
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        if started := self._builder.started:
            request.request_id, request.sampling.seed = started.request_id, started.seed
            request.resumed_token_ids[:] = self._builder.token_ids
        return request

    async def _receive(self) -> inference_pb2.GenerateResponse | None:
        """The next message; None after a complete stream."""
        raise NotImplementedError

    async def _next(self) -> Delta | None:
        """The next delta; None at the end of a complete answer."""
        while (response := await self._receive()) is not None:
            if (delta := self._builder.add(response)) is not None:
                return delta
        self._builder.answer()
        return None

    async def _read(self) -> Answer:
        """Iterates to the end and returns the whole answer."""
        while await self._next() is not None:
            pass
        return self.answer

    read = shared(_read)

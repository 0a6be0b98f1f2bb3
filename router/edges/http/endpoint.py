"""Runs a generating call, from its body to its last byte.

A call that fails before its first token is answered with the error's status. After that the
status is sent, and an error is a server-sent event called "error", which ends the stream. When the
client disconnects, or does not read, the call is cancelled on every worker.
"""

from __future__ import annotations

import asyncio
import functools
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.core.errors import Cancelled
from baton.core.process import cancel_all
from baton.core.proto_json import Json
from baton.core.types import Request
from baton.router.answers.answer_events import AnswerEvent
from baton.router.edges.auth import Caller
from baton.router.edges.client_buffer import ClientBuffer
from baton.router.edges.edge_context import EdgeContext, ParsedCall, complete_call
from baton.router.edges.http.answer_renderer import AnswerRenderer, Body, encode
from baton.router.edges.http.body import parse_body
from baton.router.edges.http.http_errors import error_response, request_id_headers
from baton.router.edges.http.http_server import CONNECTION, BoundedConnection
from baton.router.observe.ledger import CACHE_HEADER
from baton.router.served_models import ServedModel
from baton.v1 import inference_pb2 as pb

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_JSON_HEADERS = ((b"content-type", b"application/json"),)
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not buffer
)

Endpoint = Callable[[HttpRequest], Awaitable[Response]]


def request_id_of(http: HttpRequest, prefix: str = "") -> str:
    """The caller's id for its request, or a new one."""
    given = http.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"{prefix}{uuid.uuid4().hex}"


def catch_errors(endpoint: Endpoint, prompt_field: str = "prompt") -> Endpoint:
    """Turns an endpoint's errors into responses, and adds the request id to every response."""

    async def call(http: HttpRequest) -> Response:
        request_id = request_id_of(http)
        try:
            response = await endpoint(http)
        except Exception as error:  # noqa: BLE001 the edge of the process
            return error_response(error, request_id, prompt_field, http.url.path)
        response.headers.update(request_id_headers(request_id, http.url.path))
        return response

    return call


def json_response(content: Json) -> Response:
    return Response(encode(content), media_type="application/json")


class GenerationEndpoint(Generic[Body]):
    """The ASGI application of a generating path; its renderer determines the API."""

    def __init__(self, renderer: type[AnswerRenderer[Body]], context: EdgeContext) -> None:
        self._renderer = renderer
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.monotonic()
        http = HttpRequest(scope, receive)
        request_id = request_id_of(http, self._renderer.id_prefix)
        error_of = functools.partial(
            error_response,
            request_id=request_id,
            path=scope["path"],
            prompt_field=self._renderer.prompt_field,
        )
        try:
            caller: Caller = http.user
            body, requests, model = await parse_body(
                http, lambda body: self._parse(body, request_id, caller), self._context.find
            )
            call = complete_call(
                caller, model, requests, lambda name: http.headers.get(name, ""), arrived
            )
            with self._context.admit(call):
                renderer = self._render(body, call.requests, caller)
                await renderer.prepare(model.serving)
                connection = scope["state"][CONNECTION]
                answering = _Answering(
                    self._context, call, renderer, send, connection, scope["path"], error_of
                )
                await _until_disconnect(receive, answering.answer(stream=body.stream))
        except Cancelled:
            return
        except Exception as error:  # noqa: BLE001 the edge of the process
            await error_of(error)(scope, receive, send)

    def _parse(
        self, content: Json, request_id: str, caller: Caller
    ) -> tuple[Body, tuple[Request, ...], ServedModel]:
        body = self._read(content, caller)
        model = self._context.find(body.model, caller)
        requests = body.requests(request_id, model.defaults)
        return body, tuple(model.addressed(each, body.model) for each in requests), model

    def _read(self, content: Json, caller: Caller) -> Body:
        return self._renderer.body_model.parse(content)

    def _render(
        self, body: Body, requests: Sequence[Request], caller: Caller
    ) -> AnswerRenderer[Body]:
        return self._renderer(body, requests)


@dataclass(frozen=True, slots=True)
class _Answering:
    """Generates and writes the answers to one call. Records how long its writes take."""

    context: EdgeContext
    call: ParsedCall
    renderer: AnswerRenderer[Any]
    send: Send
    connection: BoundedConnection
    path: str
    error_of: Callable[[Exception], Response]

    async def answer(self, *, stream: bool) -> None:
        """Releases everything before it sends the last bytes, which end the call."""
        async with self.context.answers(self.call) as events:
            self.renderer.began(events)
            if stream:
                last = await self._stream(events)
            else:
                async for event in events:
                    self.renderer.collect(event)
                last = self.renderer.whole()
        if not stream:
            await self._start((*_JSON_HEADERS, (b"content-length", str(len(last)).encode())))
        await self.send({"type": "http.response.body", "body": last})

    async def _stream(self, events: ClientBuffer) -> bytes:
        """Sends all but the last bytes of a stream, and returns these."""
        first = await self._first_delta(events)
        await self._start(_STREAM_HEADERS)
        try:
            if first is not None:
                await self._write(first)
            events.write_now = self._write_now
            async for event in events:
                await self._write(event)
        except Exception as error:  # noqa: BLE001 the edge of the process
            return self.renderer.failure(bytes(self.error_of(error).body))
        return self.renderer.ending()

    async def _first_delta(self, events: ClientBuffer) -> AnswerEvent | None:
        """Waits for the first delta, before which an error can still set the status. Returns None
        if there is none."""
        async for event in events:
            if not isinstance(event, pb.Started):
                return event
            self.renderer.chunk(event)
        return None

    async def _start(self, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        ledger = self.call.ledger
        ids = request_id_headers(ledger.request_id, self.path)
        named = (*headers, *((name.encode(), value.encode()) for name, value in ids.items()))
        if cached := ledger.cache_header:
            named = (*named, (CACHE_HEADER.encode(), cached.encode()))
        await self.send({"type": "http.response.start", "status": 200, "headers": named})

    async def _write(self, event: AnswerEvent) -> None:
        if content := self.renderer.chunk(event):
            began = time.monotonic()
            await self.send({"type": "http.response.body", "body": content, "more_body": True})
            self._record(event, began)

    def _write_now(self, event: AnswerEvent) -> bool:
        """Writes without waiting. Returns False, writing nothing, if the client lags behind."""
        if not self.connection.keeps_up:
            return False
        if content := self.renderer.chunk(event):
            began = time.monotonic()
            self.connection.write_now(content)
            self._record(event, began)
        return True

    def _record(self, event: AnswerEvent, began: float) -> None:
        if not isinstance(event, pb.Started):
            self.call.ledger.answers[event.index].write(began)


async def _until_disconnect(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Runs `work`; cancels it and raises Cancelled when the client disconnects."""
    working = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client disconnected")
        working.result()
    finally:
        await cancel_all(working, disconnect)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

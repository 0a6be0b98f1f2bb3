"""One call that generates, from its body to its last byte.

A call that fails before its first token is answered with the error's status.
After that the status is sent, and an error is a server-sent event called
"error", which ends the stream. When the client goes away, or does not read,
the call is cancelled on every worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import re
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from baton.core.errors import Cancelled, Unavailable, UnknownModel
from baton.core.types import Prompt, TextPrompt, TokenPrompt
from baton.router.answers.answer_events import AnswerEvent, Emit, Started
from baton.router.edges.auth import Caller, KeyRing
from baton.router.edges.client_buffer import ClientBuffer, buffered
from baton.router.edges.http.answers import Api, Telling, server_sent
from baton.router.edges.http.body import read_body
from baton.router.edges.http.connection import CONNECTION, BoundedConnection
from baton.router.edges.http.errors import problem
from baton.router.edges.http.fields import Json
from baton.router.edges.http.generation import MODEL, Asked
from baton.router.observe.ledger import RequestLedger
from baton.router.requests.serving import Serving, gather_all

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_JSON_HEADERS = ((b"content-type", b"application/json"),)
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)  # proxies are to pass events on at once


@dataclass(frozen=True, slots=True)
class Door:
    """What calls need of the router."""

    serving: Serving
    model: str
    reader_buffer: int
    keys: KeyRing
    # Of the calls under way.
    buffers: set[ClientBuffer] = field(default_factory=set)

    def check_model(self, body: Json) -> None:
        name = MODEL.of(body)
        if name not in ("", self.model):
            raise UnknownModel(
                f"there is no model {name!r} here; this cluster serves {self.model!r}",
                field="model",
            )

    def end_calls(self) -> None:
        """Tells every client whose call is under way that it ends here."""
        for buffer in self.buffers:
            buffer.close(Unavailable("this router stops"))


def request_id_of(http: HttpRequest, prefix: str = "") -> str:
    """The caller's name for its request, or one of ours."""
    given = http.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"{prefix}{uuid.uuid4().hex}"


class GenerationEndpoint:
    """An ASGI application: chats or completions, as `api` shapes them."""

    def __init__(self, api: Api, door: Door) -> None:
        self._api = api
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.monotonic()
        http = HttpRequest(scope, receive)
        request_id = request_id_of(http, self._api.id_prefix)
        try:
            caller = self._door.keys.caller(http.headers.get("authorization", ""))
            asked = await read_body(http, lambda body: self._read(body, request_id, caller))
            answers = asked.n * len(asked.requests)
            ledger = RequestLedger.begin(
                request_id,
                arrived,
                answers,
                owner=caller.key.name,
                traceparent=http.headers.get("traceparent", ""),
            )
            with caller.admit(answers), self._door.serving.ledgers.keep(ledger):
                writer = _Writer(send, scope["state"][CONNECTION], ledger)
                await _unless_gone(receive, self._answer(asked, ledger, writer))
        except Cancelled:
            return
        except Exception as error:  # noqa: BLE001 the edge of the process
            response = problem(error, request_id, self._api.prompt_field).response(request_id)
            await response(scope, receive, send)

    def _read(self, body: Json, request_id: str, caller: Caller) -> Asked:
        self._door.check_model(body)
        asked = self._api.read(body, request_id)
        salted = (
            dataclasses.replace(request, cache_salt=caller.salt(request.cache_salt))
            for request in asked.requests
        )
        return dataclasses.replace(asked, requests=tuple(salted))

    async def _answer(self, asked: Asked, ledger: RequestLedger, writer: _Writer) -> None:
        """Everything is let go of before the last bytes are sent: with them the call is over."""
        openings = [await self._opening(request.prompt, asked) for request in asked.requests]
        telling = Telling(self._api, asked, self._door.model, openings)
        async with self._reading(asked, ledger) as events:
            if asked.stream:
                last = await self._stream(asked, telling, events, writer)
            else:
                async for event in events:
                    telling.note(event)
                last = telling.whole()
        if not asked.stream:
            length = str(len(last)).encode()
            headers = (*_JSON_HEADERS, (b"content-length", length))
            await _start(writer.send, asked.request_id, headers)
        await writer.send({"type": "http.response.body", "body": last})

    async def _stream(
        self, asked: Asked, telling: Telling, events: ClientBuffer, writer: _Writer
    ) -> bytes:
        """Sends all but the last bytes of a stream, and returns these."""
        first = await _first_of_an_answer(telling, events)
        await _start(writer.send, asked.request_id, _STREAM_HEADERS)
        try:
            await writer.write(first, telling.chunk(first))
            events.write_now = functools.partial(writer.write_now, telling)
            async for event in events:
                await writer.write(event, telling.chunk(event))
        except Exception as error:  # noqa: BLE001 the edge of the process
            told = problem(error, asked.request_id, self._api.prompt_field)
            return server_sent(told.body, "error")
        return telling.ending()

    @asynccontextmanager
    async def _reading(self, asked: Asked, ledger: RequestLedger) -> AsyncIterator[ClientBuffer]:
        make = functools.partial(self._make, asked, ledger)
        async with buffered(make, self._door.reader_buffer) as buffer:
            self._door.buffers.add(buffer)
            try:
                yield buffer
            finally:
                self._door.buffers.discard(buffer)

    async def _make(self, asked: Asked, ledger: RequestLedger, emit: Emit) -> None:
        """All answers to all prompts, counted through."""
        generate = self._door.serving.generate
        await gather_all(
            [
                generate(request, ledger, _shifted(emit, place * asked.n), place)
                for place, request in enumerate(asked.requests)
            ]
        )

    async def _opening(self, prompt: Prompt, asked: Asked) -> str:
        match prompt:
            case TextPrompt(text) if asked.echo:
                return text
            case TokenPrompt(token_ids) if asked.echo:
                return await self._door.serving.decode(list(token_ids), keep_special=True)
        return ""


@dataclass(frozen=True, slots=True)
class _Writer:
    """Sends what there is of answers, and notes how long that took."""

    send: Send
    connection: BoundedConnection
    ledger: RequestLedger

    async def write(self, event: AnswerEvent, content: bytes) -> None:
        if not content:
            return
        began = time.monotonic()
        await self.send({"type": "http.response.body", "body": content, "more_body": True})
        self._note(event, began)

    def write_now(self, telling: Telling, event: AnswerEvent) -> bool:
        """The same, where the client keeps up; else False."""
        if not self.connection.keeps_up:
            return False
        if content := telling.chunk(event):
            began = time.monotonic()
            self.connection.write_now(content)
            self._note(event, began)
        return True

    def _note(self, event: AnswerEvent, began: float) -> None:
        if not isinstance(event, Started):
            self.ledger.answers[event.index].write(began)


def _shifted(emit: Emit, places: int) -> Emit:
    if not places:
        return emit

    def emit_shifted(event: AnswerEvent) -> None:
        if not isinstance(event, Started):
            event = dataclasses.replace(event, index=event.index + places)
        emit(event)

    return emit_shifted


async def _first_of_an_answer(telling: Telling, events: ClientBuffer) -> AnswerEvent:
    """Until then, an error still has a status of its own."""
    async for event in events:
        if not isinstance(event, Started):
            return event
        telling.chunk(event)
    raise AssertionError("an answer ended before it began")


async def _unless_gone(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Does the work; cancels it and raises Cancelled when the client goes away."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client went away")
        working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, request_id: str, headers: tuple[tuple[bytes, bytes], ...]) -> None:
    named = (*headers, (b"x-request-id", request_id.encode()))
    await send({"type": "http.response.start", "status": 200, "headers": named})

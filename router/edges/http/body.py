"""Receives and decodes a call's body within limits of size, time and number of values.

Decoding JSON blocks every other call, even in a thread, since it holds the interpreter: 6 MiB of
text take 0.02 s, the same in small values half a second. So values are counted first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import NoReturn, TypeVar

from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from baton.core.bounds import MAX_REQUEST_BYTES, MAX_VALUES, count_values
from baton.core.errors import Cancelled, InvalidRequest
from baton.core.proto_json import Json
from baton.router.edges.auth import Caller
from baton.router.edges.http.generation_request import MAX_NAME
from baton.router.edges.http.request_model import shown

MAX_DIGITS = 4096
"""Longest integer. Python refuses longer ones, which are slow to parse."""

MAX_DISCARDED = 64 * 2**20
SHORT_BYTES = 64 * 2**10
BODY_SECONDS = 60.0

Result = TypeVar("Result")


@contextlib.asynccontextmanager
async def receive_timeout(seconds: float) -> AsyncIterator[None]:
    """Raises a 408 if the body is not received in time, and Cancelled if the client disconnects."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise HTTPException(
            408, "the body did not arrive in time", {"connection": "close"}
        ) from None
    except ClientDisconnect:
        raise Cancelled("the client disconnected") from None


async def parse_body(
    http: HttpRequest,
    parse: Callable[[Json], Result],
    check_model: Callable[[str, Caller], object] | None = None,
) -> Result:
    """Decodes a body, applies `check_model` to the model it names, then `parse` to all of it. A
    long body is decoded in a thread, so that other calls run."""
    # Any web page can send the simple content types, for which browsers make no CORS preflight.
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "the header Content-Type must be application/json")
    if (coding := http.headers.get("content-encoding", "identity")).lower() != "identity":
        raise HTTPException(
            415,
            f"the body must not be compressed: Content-Encoding is {shown(coding)}",
            {"accept-encoding": "identity"},
        )
    async with receive_timeout(BODY_SECONDS):
        content = await _receive(http)

    def decode() -> Result:
        body = _decode(content)
        if check_model:
            check_model(_model_of(body), http.user)
        return parse(body)

    return await asyncio.to_thread(decode) if len(content) > SHORT_BYTES else decode()


async def _receive(http: HttpRequest) -> bytes:
    content = bytearray()
    async for chunk in body_chunks(http, MAX_REQUEST_BYTES, "the body"):
        content += chunk
    return bytes(content)


async def body_chunks(
    http: HttpRequest, most: int, what: str, margin: int = 0
) -> AsyncGenerator[bytes, None]:
    """Yields a body's chunks, up to `most` bytes plus a `margin` for the form around a file. The
    rest of a larger body is received and dropped, within limits: most clients send all of it before
    they read, and would lose the error if the connection were closed meanwhile."""
    refused = HTTPException(413, f"{what} must have at most {most} bytes", {"connection": "close"})
    limit, announced, received = most + margin, _announced(http), 0
    if announced > limit and "expect" in http.headers:  # the client asks before it sends
        raise refused
    async for chunk in http.stream():
        received += len(chunk)
        if (size := max(announced, received)) <= limit:
            yield chunk
        elif size > limit + MAX_DISCARDED:
            break
    if max(announced, received) > limit:
        raise refused


def _announced(http: HttpRequest) -> int:
    length = http.headers.get("content-length", "")
    return int(length[:19]) if length.isdecimal() else 0


def _decode(content: bytes) -> Json:
    if count_values(content) > MAX_VALUES:
        raise HTTPException(
            413, f"the body must have at most {MAX_VALUES} values, of which a key counts as three"
        )
    try:
        body = from_json(content, allow_inf_nan=False)
    except ValueError:
        body = _decode_slowly(content)
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def _decode_slowly(content: bytes) -> object:
    """Accepts deeper nesting, and lone surrogates, which the request model refuses by field."""
    try:
        return json.loads(
            content.decode(), parse_constant=_refuse_constant, parse_int=_parse_integer
        )
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(f"the body is not valid JSON: {reason}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _parse_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number must have at most {MAX_DIGITS} digits")
    return int(digits)


def _model_of(body: Json) -> str:
    """The body's model, for a check before parsing; empty if invalid, which parsing refuses."""
    name = body.get("model")
    return name if isinstance(name, str) and len(name) <= MAX_NAME else ""

"""Receives a call's body within limits of size, time and number of values, and decodes it.

Decoding JSON blocks every other call, even in a thread, since it holds the interpreter: 6 MiB of
text take 0.02 s, the same in small values half a second. So values are counted first.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import NoReturn, TypeVar

from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from baton.core.bounds import MAX_REQUEST_BYTES
from baton.core.errors import Cancelled, InvalidRequest
from baton.core.proto_json import Json

MAX_VALUES = 300_000
"""About 0.05 seconds, and enough for a context of 2**18 token ids. gRPC takes longer lists."""

COSTS = {b",": 1, b"[": 1, b"{": 1, b":": 3}
"""What is beside a value or a key, and its cost in the time of a number."""

SHORT_BYTES = 64 * 2**10
BODY_SECONDS = 60.0

Result = TypeVar("Result")


async def parse_body(http: Request, parse: Callable[[Json], Result]) -> Result:
    """Applies `parse` to the body. A long body is decoded in a thread, so that other calls run."""
    # A web page could send any other type here without its browser asking first.
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "the header Content-Type must be application/json")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            content = await _receive(http)
    except TimeoutError:
        raise HTTPException(
            408, "the body did not arrive in time", {"connection": "close"}
        ) from None
    except ClientDisconnect:
        raise Cancelled("the client disconnected") from None
    if len(content) > SHORT_BYTES:
        return await asyncio.to_thread(lambda: parse(_decode(content)))
    return parse(_decode(content))


async def _receive(http: Request) -> bytes:
    length = http.headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_REQUEST_BYTES:
        raise _too_large()
    content = bytearray()
    async for chunk in http.stream():
        content += chunk
        if len(content) > MAX_REQUEST_BYTES:
            raise _too_large()
    return bytes(content)


def _too_large() -> HTTPException:
    # The rest of the body is not received.
    return HTTPException(
        413, f"the body must have at most {MAX_REQUEST_BYTES} bytes", {"connection": "close"}
    )


def _decode(content: bytes) -> Json:
    # An upper bound: commas in a text count as well.
    if sum(cost * content.count(sign) for sign, cost in COSTS.items()) > MAX_VALUES:
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
    """Accepts deeper nesting, and lone surrogates, whose field the model names."""
    try:
        return json.loads(content.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(f"the body is not valid JSON: {reason}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")

"""A call's body, read with care: so many bytes, in so much time, JSON, an object."""

from __future__ import annotations

import asyncio
import json
from typing import NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from core.errors import Cancelled, InvalidRequest
from router.http.fields import Json

MAX_BODY_BYTES = 16 * 2**20
"""More than a million tokens as text."""

BODY_SECONDS = 60.0


async def read_json(http: Request) -> Json:
    """Raises what the caller is to be told."""
    # Anything else a web page could send here without asking its browser's leave.
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "the header Content-Type must be application/json")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            content = await _read(http)
    except TimeoutError:
        raise HTTPException(
            408, "the body did not arrive in time", {"connection": "close"}
        ) from None
    except ClientDisconnect:
        raise Cancelled("the client went away") from None
    return _parse(content)


async def _read(http: Request) -> bytes:
    length = http.headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    content = bytearray()
    async for piece in http.stream():
        content += piece
        if len(content) > MAX_BODY_BYTES:
            raise _too_large()
    return bytes(content)


def _too_large() -> HTTPException:
    # What is still on its way is not read.
    return HTTPException(
        413, f"the body must have at most {MAX_BODY_BYTES} bytes", {"connection": "close"}
    )


def _parse(content: bytes) -> Json:
    try:
        body = json.loads(content.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(f"the body is not valid JSON: {reason}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON's")

"""A call's body, read with care: so many bytes, in so much time, JSON, an object.

Reading JSON stops every other call, even in a thread, since it does not let go of the
interpreter: 6 MiB of text take 0.02 s, but the same in small values half a second. So
values are counted before.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import NoReturn, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from baton.core.bounds import MAX_REQUEST_BYTES
from baton.core.errors import Cancelled, InvalidRequest
from baton.router.edges.http.fields import Json

MAX_VALUES = 300_000
"""Some 0.05 seconds, and enough for a context of 2**18 token ids. Longer lists of them can be sent
over gRPC."""

COSTS = {b",": 1, b"[": 1, b"{": 1, b":": 3}
"""What stands beside a value or a key, and what these cost, in the time of a number."""

SHORT_BYTES = 64 * 2**10
BODY_SECONDS = 60.0

Result = TypeVar("Result")


async def read_body(http: Request, read: Callable[[Json], Result]) -> Result:
    """What `read` makes of the body. Raises what the caller is to be told.

    A long body is read in a thread, so that other calls go on.
    """
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
    if len(content) > SHORT_BYTES:
        return await asyncio.to_thread(lambda: read(_parse(content)))
    return read(_parse(content))


async def _read(http: Request) -> bytes:
    length = http.headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_REQUEST_BYTES:
        raise _too_large()
    content = bytearray()
    async for piece in http.stream():
        content += piece
        if len(content) > MAX_REQUEST_BYTES:
            raise _too_large()
    return bytes(content)


def _too_large() -> HTTPException:
    # What is still on its way is not read.
    return HTTPException(
        413, f"the body must have at most {MAX_REQUEST_BYTES} bytes", {"connection": "close"}
    )


def _parse(content: bytes) -> Json:
    # More than there are where a text has commas, and never fewer.
    if sum(cost * content.count(sign) for sign, cost in COSTS.items()) > MAX_VALUES:
        raise HTTPException(
            413, f"the body must have at most {MAX_VALUES} values, of which a key counts as three"
        )
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

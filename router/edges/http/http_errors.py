"""Renders errors in the format of the called API: a status and a body.

The OpenAI API's errors have message, type, param and code; /v1/messages has type and message.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from starlette.exceptions import HTTPException
from starlette.responses import Response

from baton.core.errors import (
    BatonError,
    DeadlineExceeded,
    Exhausted,
    Internal,
    LayoutMismatch,
    NotCached,
    NotServed,
    PromptTooLong,
    RateLimited,
    SlowReader,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    WorkerLost,
)
from baton.router.edges.http.answer_renderer import encode
from baton.router.edges.http.answer_types import (
    ErrorBody,
    MessagesErrorBody,
    MessagesErrorDetails,
    MessagesErrorObject,
)
from baton.rpc import redact

log = logging.getLogger(__name__)

# OpenAI's error codes. Errors without one have their reason as code.
_CODES: dict[type[BatonError], str] = {
    Unauthenticated: "invalid_api_key",
    UnknownModel: "model_not_found",
    PromptTooLong: "context_length_exceeded",
    NotServed: "unsupported_parameter",
    Exhausted: "rate_limit_exceeded",
}

# Workers' messages can hold addresses and paths, which are for the log.
_PUBLIC: dict[type[BatonError], str] = {
    WorkerLost: "the worker that ran the request was lost; try again",
    LayoutMismatch: "the workers do not fit each other; an operator must look at them",
    Unavailable: "",
    DeadlineExceeded: "",
    BatonError: "the server failed; its log has the details under this request's id",
}

# Internal names of the prompt. Each endpoint has its own public one.
_PROMPT_FIELDS = {"prompt", "chat", "chat.messages", "token_ids"}
MESSAGES_PATH = "/v1/messages"
OVERLOADED_STATUS = 529
# Error types of the Anthropic API, by status.
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}
# By refused field. This code tells SDKs to send the whole conversation with every request.
_MESSAGES_DETAILS: dict[str, MessagesErrorDetails] = {
    "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
}


@contextmanager
def fields_named(**names: str) -> Iterator[None]:
    """Gives fields of errors the names that an endpoint has for them."""
    try:
        yield
    except BatonError as error:
        error.field = names.get(error.field, error.field)
        raise


def request_id_headers(request_id: str, path: str) -> dict[str, str]:
    """The headers that tell a client of `path` the request's id; each API has its own name."""
    names = ["x-request-id", *(["request-id"] if path.startswith(MESSAGES_PATH) else [])]
    return dict.fromkeys(names, request_id)


def error_response(
    error: Exception, request_id: str, prompt_field: str = "prompt", path: str = ""
) -> Response:
    """Renders `error` for a client of `path`. What the client may not see is logged."""
    messages = path.startswith(MESSAGES_PATH)
    respond = functools.partial(_response, request_id, path)
    if isinstance(error, HTTPException):
        # Raised before any field is parsed.
        return respond(error.status_code, error.detail, error.headers or {})
    if not isinstance(error, BatonError):
        log.error("request %s failed unexpectedly", request_id, exc_info=error)
        error = Internal("")
    status = error.http_status
    message = error.message
    if status >= 500 and not isinstance(error, NotCached):  # the caller asked for it
        message = _nearest(_PUBLIC, error) or redact(message)
        log.warning("request %s: %s: %s", request_id, error.reason, error.message)
    param = error.field
    if error.field in _PROMPT_FIELDS and not isinstance(error, NotServed):
        param = prompt_field
    code = "" if isinstance(error, SlowReader) else _nearest(_CODES, error)
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    if error.retry_after:
        headers["retry-after"] = str(math.ceil(error.retry_after))
    if messages and _overloaded(error):
        status = OVERLOADED_STATUS
    return respond(status, message, headers, param, code or error.reason.lower())


def _overloaded(error: BatonError) -> bool:
    """True if the cluster is full or unavailable, not if the caller is at a limit of its own."""
    if isinstance(error, RateLimited | SlowReader):
        return False
    return isinstance(error, Exhausted | Unavailable)


def _nearest(table: dict[type[BatonError], str], error: BatonError) -> str:
    """The entry of the error's class, or of its nearest ancestor that has one."""
    return next((table[cls] for cls in type(error).__mro__ if cls in table), "")


def _response(
    request_id: str,
    path: str,
    status: int,
    message: str,
    headers: Mapping[str, str],
    param: str = "",
    code: str = "",
) -> Response:
    named = {**headers, **request_id_headers(request_id, path)}
    body: ErrorBody | MessagesErrorBody
    if path.startswith(MESSAGES_PATH):
        kind = _MESSAGES_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        error: MessagesErrorObject = {"type": kind, "message": message}
        if details := _MESSAGES_DETAILS.get(param):
            error["details"] = details
        body = {"type": "error", "error": error, "request_id": request_id}
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
        kind = "requests" if status == 429 else kind
        body = {
            "error": {
                "message": message,
                "type": kind,
                "param": param or None,
                "code": code or None,
            }
        }
    return Response(encode(body), status, named, "application/json")

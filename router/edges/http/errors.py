"""An error as the OpenAI API tells it: a status, and a body with message, type, param, code."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.responses import Response

from baton.core.errors import (
    BatonError,
    DeadlineExceeded,
    Exhausted,
    Internal,
    LayoutMismatch,
    NotServed,
    PromptTooLong,
    SlowReader,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    WorkerLost,
    translation,
)
from baton.router.edges.http.answers import encode
from baton.router.edges.http.fields import Json
from baton.rpc.statuses import redact

log = logging.getLogger(__name__)

# The API's own names where it has one; elsewhere ours.
_CODES: dict[type[BatonError], str] = {
    Unauthenticated: "invalid_api_key",
    UnknownModel: "model_not_found",
    PromptTooLong: "context_length_exceeded",
    NotServed: "unsupported_parameter",
    Exhausted: "rate_limit_exceeded",
}

# Workers' own words can hold addresses and paths, which are for the log.
_PUBLIC: dict[type[BatonError], str] = {
    WorkerLost: "the worker that ran the request was lost; try again",
    LayoutMismatch: "the workers do not fit each other; an operator must look at them",
    Unavailable: "",
    DeadlineExceeded: "",
    BatonError: "the server failed; its log has the details under this request's id",
}

# How serving calls the prompt; each endpoint has a name of its own for it.
_PROMPT_FIELDS = {"prompt", "chat", "chat.messages", "token_ids"}
# How serving calls other fields, and what they are called here.
_RENAMED = {"json_schema": "response_format"}


@dataclass(frozen=True, slots=True)
class Problem:
    """An error, ready to be sent."""

    status: int
    body: Json
    headers: dict[str, str] = field(default_factory=dict)

    def response(self, request_id: str) -> Response:
        headers = {**self.headers, "x-request-id": request_id}
        return Response(encode(self.body), self.status, headers, "application/json")


def problem(error: Exception, request_id: str, prompt_field: str = "prompt") -> Problem:
    """What a client is told of `error`; what it is not told is logged."""
    if isinstance(error, HTTPException):
        return _of_http(error)
    if not isinstance(error, BatonError):
        log.error("request %s failed unexpectedly", request_id, exc_info=error)
        error = Internal("")
    return _of_ours(error, request_id, prompt_field)


def _of_ours(error: BatonError, request_id: str, prompt_field: str) -> Problem:
    status = translation(error).http
    message = error.message
    if status >= 500:
        message = _nearest(_PUBLIC, error) or redact(message)
        log.warning("request %s: %s: %s", request_id, error.reason, error.message)
    param = (
        prompt_field if error.field in _PROMPT_FIELDS else _RENAMED.get(error.field, error.field)
    )
    code = error.reason.lower() if isinstance(error, SlowReader) else _nearest(_CODES, error)
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    if error.retry_after:
        headers["retry-after"] = str(math.ceil(error.retry_after))
    return Problem(status, _body(status, message, param, code or error.reason.lower()), headers)


def _of_http(error: HTTPException) -> Problem:
    """Of what is wrong before any field is looked at."""
    headers = dict(error.headers or {})
    return Problem(error.status_code, _body(error.status_code, error.detail, "", ""), headers)


def _nearest(table: dict[type[BatonError], str], error: BatonError) -> str:
    """The entry of the error's class, or of its nearest ancestor that has one."""
    return next((table[cls] for cls in type(error).__mro__ if cls in table), "")


def _body(status: int, message: str, param: str, code: str) -> Json:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {
            "message": message,
            "type": "requests" if status == 429 else kind,
            "param": param or None,
            "code": code or None,
        }
    }

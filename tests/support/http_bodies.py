"""Bodies of the HTTP API: a greeting, with any further fields."""

from __future__ import annotations

from dataclasses import replace

from baton.core.generation_defaults import NO_DEFAULTS
from baton.core.proto_json import Json
from baton.core.types import Request
from baton.router.edges.http.chat_request import ChatRequest
from baton.router.edges.http.completion_request import CompletionRequest
from baton.router.edges.http.generation_request import PromptRequest

HELLO: Json = {"messages": [{"role": "user", "content": "Hello"}]}


def chat(**fields: object) -> tuple[Request, ...]:
    return ChatRequest.parse({**HELLO, **fields}).requests("id", NO_DEFAULTS)


def completion(**fields: object) -> tuple[Request, ...]:
    return CompletionRequest.parse({"prompt": "Hello", **fields}).requests("id", NO_DEFAULTS)


def addressed(body: PromptRequest, request_id: str) -> list[Request]:
    """A body's requests, to the model "tiny"."""
    return [replace(each, model="tiny") for each in body.requests(request_id, NO_DEFAULTS)]


def request(requests: tuple[Request, ...]) -> Request:
    (only,) = requests
    return only

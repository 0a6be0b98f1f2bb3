"""Bodies of the HTTP API: a greeting, with any further fields."""

from __future__ import annotations

from baton.core.proto_json import Json
from baton.core.types import Request
from baton.router.edges.http.chat_request import ChatRequest
from baton.router.edges.http.completion_request import CompletionRequest

HELLO: Json = {"messages": [{"role": "user", "content": "Hello"}]}


def chat(**fields: object) -> tuple[Request, ...]:
    return ChatRequest.parse({**HELLO, **fields}).requests("id", str)


def completion(**fields: object) -> tuple[Request, ...]:
    return CompletionRequest.parse({"prompt": "Hello", **fields}).requests("id", str)


def request(requests: tuple[Request, ...]) -> Request:
    (only,) = requests
    return only

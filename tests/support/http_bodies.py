"""Bodies of the HTTP API: a greeting, with any further fields."""

from __future__ import annotations

from baton.core.proto_json import Json
from baton.core.types import Request
from baton.router.edges.http.generation_request import ParsedCall
from baton.router.edges.http.openai_answers import ChatApi, CompletionsApi

HELLO: Json = {"messages": [{"role": "user", "content": "Hello"}]}


def chat(**fields: object) -> ParsedCall:
    return ChatApi().parse({**HELLO, **fields}, "id", str)


def completion(**fields: object) -> ParsedCall:
    return CompletionsApi().parse({"prompt": "Hello", **fields}, "id", str)


def request(call: ParsedCall) -> Request:
    (only,) = call.requests
    return only

"""Bodies of the HTTP API: a greeting, with any further fields."""

from __future__ import annotations

from baton.core.types import Request
from baton.router.edges.http.chat import ChatApi
from baton.router.edges.http.completions import CompletionsApi
from baton.router.edges.http.fields import Json
from baton.router.edges.http.generation import Asked

HELLO: Json = {"messages": [{"role": "user", "content": "Hello"}]}


def chat(**fields: object) -> Asked:
    return ChatApi().read({**HELLO, **fields}, "id")


def completion(**fields: object) -> Asked:
    return CompletionsApi().read({"prompt": "Hello", **fields}, "id")


def request(asked: Asked) -> Request:
    (only,) = asked.requests
    return only

"""What the HTTP API reads in a body that says hello, and more."""

from __future__ import annotations

from core.types import Request
from router.http.chat import ChatApi
from router.http.completions import CompletionsApi
from router.http.fields import Json
from router.http.generation import Asked

HELLO: Json = {"messages": [{"role": "user", "content": "Hello"}]}


def chat(**fields: object) -> Asked:
    return ChatApi().read({**HELLO, **fields}, "id")


def completion(**fields: object) -> Asked:
    return CompletionsApi().read({"prompt": "Hello", **fields}, "id")


def request(asked: Asked) -> Request:
    (only,) = asked.requests
    return only

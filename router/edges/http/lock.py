"""API keys at the HTTP door: a call without one is told whether the router lives, and no more."""

from __future__ import annotations

from collections.abc import Collection

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.core.errors import PermissionDenied, Unauthenticated
from baton.router.edges.auth import KeyRing
from baton.router.edges.http.endpoint import request_id_of
from baton.router.edges.http.errors import problem

OPEN = ("/health", "/ready")
_ADMIN = ("/v1/requests",)


class KeyLock:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open:
            http = Request(scope)
            try:
                caller = self._keys.caller(http.headers.get("authorization", ""))
                if scope["path"] in _ADMIN and not caller.admin:
                    raise PermissionDenied("this needs an admin's API key")
            except (Unauthenticated, PermissionDenied) as error:
                request_id = request_id_of(http)
                await problem(error, request_id).response(request_id)(scope, receive, send)
                return
        await self._app(scope, receive, send)

"""The page at `/`: a few files of ours, kept in memory, and what browsers may do with them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = "page"
_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, and no frame around it.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    kind: str
    tag: str


class Page:
    def __init__(self) -> None:
        folder = resources.files("baton.router.edges.http").joinpath(_FOLDER)
        self._files = {
            entry.name: _read(entry.name, entry.read_bytes()) for entry in folder.iterdir()
        }

    @property
    def paths(self) -> list[str]:
        """What everybody may load: the page asks for a key where the router does."""
        return ["/", *(f"/{_FOLDER}/{name}" for name in self._files)]

    @property
    def routes(self) -> list[Route]:
        return [Route("/", self._index), Route(f"/{_FOLDER}/{{name}}", self._file)]

    async def _index(self, http: HttpRequest) -> Response:
        return self._respond(http, "index.html")

    async def _file(self, http: HttpRequest) -> Response:
        return self._respond(http, http.path_params["name"])

    def _respond(self, http: HttpRequest, name: str) -> Response:
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404)
        headers = {**_HEADERS, "etag": file.tag}
        if http.headers.get("if-none-match") == file.tag:
            return Response(None, 304, headers)
        return Response(file.content, headers=headers, media_type=file.kind)


def _read(name: str, content: bytes) -> _File:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return _File(content, _KINDS[name.rpartition(".")[2]], tag)

"""The routes of the page: its files, kept in memory."""

from __future__ import annotations

import hashlib
from importlib import resources

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from baton.router.edges.http.endpoint import Endpoint

_PAGE_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Nothing from other hosts, nothing inline, no frame around it, and no text that becomes HTML.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    routes = []
    for entry in resources.files(__package__).joinpath("page").iterdir():
        endpoint = _file_endpoint(entry.read_bytes(), _PAGE_TYPES[entry.name.rpartition(".")[2]])
        routes.append(Route(f"/page/{entry.name}", endpoint))
        if entry.name == "index.html":
            routes.append(Route("/", endpoint))
    return routes


def _file_endpoint(content: bytes, media_type: str) -> Endpoint:
    headers = {**_PAGE_HEADERS, "etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}

    async def endpoint(http: HttpRequest) -> Response:
        if http.headers.get("if-none-match") == headers["etag"]:
            return Response(None, 304, headers)
        return Response(content, headers=headers, media_type=media_type)

    return endpoint

"""Routes of the HTTP edge, API keys in front of them, the page, and the endpoints that generate
nothing."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection
from importlib import resources

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton import __version__
from baton.core.batch_lines import BATCH_ENDPOINTS
from baton.core.errors import (
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from baton.core.proto_json import Json, to_json
from baton.router.edges.auth import KeyRing
from baton.router.edges.edge_context import EdgeContext
from baton.router.edges.http.admin_endpoints import (
    LOAD_ADAPTER,
    LOAD_MODEL,
    UNLOAD_ADAPTER,
    UNLOAD_MODEL,
    adapter_routes,
    model_routes,
)
from baton.router.edges.http.answer_renderer import encode
from baton.router.edges.http.answer_types import TargetGroup
from baton.router.edges.http.batches.batch_endpoints import BatchEndpoints
from baton.router.edges.http.batches.batch_store import BatchStore
from baton.router.edges.http.body import parse_body
from baton.router.edges.http.chat_request import DetokenizeRequest, TokenizeRequest
from baton.router.edges.http.choice_renderer import ChatRenderer, CompletionRenderer
from baton.router.edges.http.embeddings import EmbeddingsRenderer
from baton.router.edges.http.endpoint import (
    Endpoint,
    GenerationEndpoint,
    catch_errors,
    json_response,
    query_limit,
    request_id_of,
)
from baton.router.edges.http.http_errors import MESSAGES_PATH, error_response
from baton.router.edges.http.messages.messages_renderer import MessagesRenderer
from baton.router.edges.http.messages.messages_request import CountTokensRequest
from baton.router.edges.http.openapi import document
from baton.router.edges.http.request_model import shown
from baton.router.edges.http.responses.responses_endpoint import responses_routes
from baton.router.followed_models import FollowedModels
from baton.router.observe.ledger import KEPT_REQUESTS
from baton.router.observe.overview import RECENT_REQUESTS, RouterOverview

OPEN_PATHS = ("/health", "/ready")
"""Need no API key, like the page, which asks for one where the router does."""

TARGETS = "/metrics/targets"
_ADMIN_PATHS = (
    *("/v1/requests", TARGETS),
    *(LOAD_ADAPTER, UNLOAD_ADAPTER, LOAD_MODEL, UNLOAD_MODEL),
)
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


class ApiKeyMiddleware:
    """The caller becomes the request's `user`."""

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open:
            http = HttpRequest(scope)
            try:
                scope["user"] = self._keys.caller(_authorization(http))
                if scope["path"] in _ADMIN_PATHS and not http.user.admin:
                    raise PermissionDenied("this needs an admin's API key")
            except (Unauthenticated, PermissionDenied) as error:
                await (await _refuse(http, error))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _authorization(http: HttpRequest) -> str:
    """Clients of the Anthropic API send a key in a header of its own."""
    key = http.headers.get("x-api-key", "")
    return http.headers.get("authorization") or (f"Bearer {key}" if key else "")


class HttpApp:
    """`app` is the ASGI application."""

    def __init__(
        self,
        context: EdgeContext,
        overview: RouterOverview,
        registry: CollectorRegistry,
        followed: FollowedModels,
        *,
        open_metrics: bool = False,
        cors_origins: Collection[str] = (),
        batches: BatchStore | None = None,
    ) -> None:
        self._context = context
        self._batches = BatchEndpoints(batches)
        self._overview = overview
        self._registry = registry
        self._followed = followed
        self._document = encode(document())
        routes = self._routes()
        self.batched = {each.path: each.app for each in routes if each.path in BATCH_ENDPOINTS}
        paths = [each.path.replace(":path", "") for each in routes if each.path.startswith("/v1/")]
        self._served = ", ".join(paths)
        page = _page_routes()
        open_paths = [*OPEN_PATHS, *(route.path for route in page)]
        if open_metrics:
            open_paths += ["/metrics", TARGETS]
        self.app = Starlette(
            routes=[*routes, *page],
            middleware=[
                *_cors(cors_origins),
                Middleware(ApiKeyMiddleware, keys=context.keys, open_paths=open_paths),
            ],
            exception_handlers={404: self._not_found, HTTPException: _refuse},
        )
        # A redirect would contain the host name that the caller used.
        self.app.router.redirect_slashes = False

    def _routes(self) -> list[Route]:
        chat = GenerationEndpoint(ChatRenderer, self._context)
        completions = GenerationEndpoint(CompletionRenderer, self._context)
        messages = GenerationEndpoint(MessagesRenderer, self._context)
        embeddings = GenerationEndpoint(EmbeddingsRenderer, self._context)
        return [
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route(MESSAGES_PATH, messages, methods=["POST"]),
            Route(
                f"{MESSAGES_PATH}/count_tokens",
                catch_errors(self._count_tokens, "messages"),
                methods=["POST"],
            ),
            *responses_routes(self._context),
            *self._batches.routes(),
            *model_routes(self._followed),
            Route("/v1/models", catch_errors(self._models)),
            Route("/v1/models/{name:path}", catch_errors(self._model, "model")),
            *adapter_routes(self._context),
            Route("/v1/cluster", catch_errors(self._cluster)),
            Route("/v1/diagnosis", catch_errors(self._diagnosis)),
            Route("/v1/trends", catch_errors(self._trends)),
            Route("/v1/requests", catch_errors(self._recent)),
            Route("/v1/requests/{request_id:path}/timing", catch_errors(self._timing)),
            Route("/tokenize", catch_errors(self._tokenize), methods=["POST"]),
            Route("/detokenize", catch_errors(self._detokenize, "tokens"), methods=["POST"]),
            Route("/tokenizer_info", catch_errors(self._tokenizer_info)),
            Route("/health", _plain(lambda: {"status": "ok"})),
            Route("/ready", _plain(self._ready)),
            Route("/version", _plain(lambda: {"version": __version__})),
            Route("/metrics", catch_errors(self._metrics)),
            Route(TARGETS, catch_errors(self._targets)),
            Route("/openapi.json", catch_errors(self._openapi)),
        ]

    async def _not_found(self, http: HttpRequest, error: Exception) -> Response:
        path = shown(http.url.path)
        return await _refuse(
            http, HTTPException(404, f"there is no {path} here; served are {self._served}")
        )

    async def _models(self, http: HttpRequest) -> Response:
        models = [self._model_object(name) for name in self._context.model_names(http.user)]
        return json_response({"object": "list", "data": models})

    async def _model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        self._context.find(name, http.user)
        return json_response(self._model_object(name))

    def _model_object(self, name: str) -> Json:
        served = self._context.models.find(name)
        embedding = served.embedding_model
        embeds = embedding is not None and name == embedding.name
        context = served.membership.context_length()
        model: Json = {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "baton",
            "max_model_len": embedding.max_tokens if embedding and embeds else context,
        }
        return model if embeds or name == served.name else {**model, "parent": served.name}

    async def _cluster(self, http: HttpRequest) -> Response:
        return json_response(to_json(self._overview.public_status(http.user)))

    async def _diagnosis(self, http: HttpRequest) -> Response:
        model = http.query_params.get("model", "")
        return json_response(to_json(self._overview.diagnosis(model, http.user)))

    async def _trends(self, http: HttpRequest) -> Response:
        model = http.query_params.get("model", "")
        return json_response(to_json(self._overview.trends(model, http.user)))

    async def _tokenizer_info(self, http: HttpRequest) -> Response:
        model = self._context.find(http.query_params.get("model", ""), http.user)
        return json_response({**model.serving.text.tokenizer_info})

    async def _recent(self, http: HttpRequest) -> Response:
        found = self._overview.recent(
            query_limit(http.query_params.get("limit"), RECENT_REQUESTS, KEPT_REQUESTS)
        )
        return json_response({"object": "list", "data": [to_json(timing) for timing in found]})

    async def _timing(self, http: HttpRequest) -> Response:
        return json_response(
            to_json(self._overview.timing(http.path_params["request_id"], http.user))
        )

    async def _tokenize(self, http: HttpRequest) -> Response:
        body = await parse_body(http, TokenizeRequest.parse, self._context.find_generating)
        model = self._context.find(body.model, http.user)
        tokens, rendered = await model.serving.tokenize(body.to_prompt(), body.add_special_tokens)
        answer: Json = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": model.membership.context_length(),
        }
        return json_response({**answer, "rendered": rendered} if rendered else answer)

    async def _count_tokens(self, http: HttpRequest) -> Response:
        body = await parse_body(http, CountTokensRequest.parse, self._context.find_generating)
        serving = self._context.find(body.model, http.user).serving
        tokens, _ = await serving.tokenize(body.chat_prompt())
        return json_response({"input_tokens": len(tokens)})

    async def _detokenize(self, http: HttpRequest) -> Response:
        request = await parse_body(http, DetokenizeRequest.parse, self._context.find_generating)
        decode = self._context.find(request.model, http.user).serving.decode
        text = await decode(request.tokens, request.keep_special_tokens, "tokens")
        return json_response({"prompt": text})

    def _ready(self) -> Json:
        if self._context.activity.draining:
            raise Unavailable("this router is about to stop and takes no new requests")
        if not self._context.can_place:
            raise Unavailable("no workers are ready")
        return {"status": "ready"}

    async def _metrics(self, http: HttpRequest) -> Response:
        text = await asyncio.to_thread(generate_latest, self._registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _targets(self, http: HttpRequest) -> Response:
        """For Prometheus's http_sd_configs. A worker's series carry its name and role."""
        groups: list[TargetGroup] = [{"targets": self._overview.metrics_addresses(), "labels": {}}]
        return Response(encode(groups), media_type="application/json")

    async def _openapi(self, http: HttpRequest) -> Response:
        return Response(self._document, media_type="application/json")


def _cors(origins: Collection[str]) -> list[Middleware]:
    """In front of the keys: a browser's preflight request has none, and a page must be able to
    read a 401. Keys come in a header, so no cookies are allowed."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),  # SDKs send headers of their own
            expose_headers=("x-request-id", "retry-after"),
        )
    ]


def _plain(get: Callable[[], Json]) -> Endpoint:
    async def endpoint(http: HttpRequest) -> Response:
        return json_response(get())

    return catch_errors(endpoint)


async def _refuse(http: HttpRequest, error: Exception) -> Response:
    """Also where a path has no such method."""
    return error_response(error, request_id_of(http), path=http.url.path)


def _page_routes() -> list[Route]:
    """The page's files, kept in memory."""
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

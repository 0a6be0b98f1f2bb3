"""The HTTP edge's routes, its API key check, the page, and the endpoints that do not generate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from datetime import UTC, datetime

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from baton import __version__
from baton.core.batch_lines import BATCH_ENDPOINTS
from baton.core.errors import (
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from baton.core.proto_json import Json, to_json
from baton.core.types import Role
from baton.router.edges.auth import KeyRing
from baton.router.edges.edge_context import EdgeContext
from baton.router.edges.http import openapi as api
from baton.router.edges.http.admin_endpoints import AdminEndpoints
from baton.router.edges.http.answer_renderer import encode
from baton.router.edges.http.answer_types import TargetGroup
from baton.router.edges.http.batches.batch_endpoints import (
    MAX_BATCHES_LISTED,
    MAX_FILES_LISTED,
    BatchEndpoints,
)
from baton.router.edges.http.batches.batch_store import BatchStore
from baton.router.edges.http.body import parse_body
from baton.router.edges.http.chat_request import DetokenizeRequest, TokenizeRequest
from baton.router.edges.http.choice_renderer import ChatRenderer, CompletionRenderer
from baton.router.edges.http.embeddings import EmbeddingsRenderer
from baton.router.edges.http.endpoint import (
    Endpoint,
    GenerationEndpoint,
    json_response,
    request_id_of,
)
from baton.router.edges.http.http_errors import MESSAGES_PATH, error_response
from baton.router.edges.http.messages.messages_renderer import MessagesRenderer
from baton.router.edges.http.messages.messages_request import CountTokensRequest
from baton.router.edges.http.openapi import STRING, ApiRoute
from baton.router.edges.http.page_routes import page_routes
from baton.router.edges.http.paging import list_fields, query_limit
from baton.router.edges.http.request_model import shown
from baton.router.edges.http.responses.input_items import MAX_ITEMS_LISTED
from baton.router.edges.http.responses.responses_endpoint import ResponsesEndpoint
from baton.router.followed_models import FollowedModels
from baton.router.observe.ledger import KEPT_REQUESTS
from baton.router.observe.overview import RECENT_REQUESTS, RouterOverview
from baton.router.placement.policy import none_ready

OPEN_PATHS = ("/health", "/ready")
"""Need no API key, like the page, which asks its user for one if the router requires it."""

TARGETS = "/metrics/targets"
MODEL = api.query("model")


class ApiKeyMiddleware:
    """Checks the API key. The caller becomes the request's `user`."""

    def __init__(
        self, app: ASGIApp, keys: KeyRing, open_paths: Collection[str], admin_paths: Collection[str]
    ) -> None:
        self._app = app
        self._keys = keys
        self._open, self._admin = open_paths, admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open:
            http = HttpRequest(scope)
            try:
                scope["user"] = self._keys.caller(_authorization(http))
                if scope["path"] in self._admin and not http.user.admin:
                    raise PermissionDenied("this needs an admin's API key")
            except (Unauthenticated, PermissionDenied) as error:
                await (await _refuse(http, error))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _authorization(http: HttpRequest) -> str:
    """The Authorization header, or that of x-api-key, which clients of the Anthropic API send."""
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
        self._overview = overview
        self._registry = registry
        table = [
            *self._generation_routes(),
            *_batch_routes(BatchEndpoints(batches)),
            *self._other_routes(AdminEndpoints(followed, context)),
        ]
        self.document = encode(api.document(table))
        paths = [each.path.replace(":path", "") for each in table if each.path.startswith("/v1/")]
        self._served = ", ".join(paths)
        # Paths with a parameter last, since they would match fixed paths too.
        routes = [each.route() for each in sorted(table, key=lambda each: "{" in each.path)]
        self.batched = {each.path: each.app for each in routes if each.path in BATCH_ENDPOINTS}
        page = page_routes()
        admin_paths = [each.path for each in table if each.admin]
        open_paths = [*OPEN_PATHS, *(route.path for route in page)]
        if open_metrics:
            open_paths += ["/metrics", TARGETS]
        self.app = Starlette(
            routes=[*routes, *page],
            middleware=[
                *_cors(cors_origins),
                Middleware(ApiKeyMiddleware, context.keys, open_paths, admin_paths),
            ],
            exception_handlers={404: self._not_found, 405: _wrong_method, HTTPException: _refuse},
        )
        # A redirect would contain the host name that the caller used.
        self.app.router.redirect_slashes = False

    def _generation_routes(self) -> list[ApiRoute]:
        chat = GenerationEndpoint(ChatRenderer, self._context)
        completions = GenerationEndpoint(CompletionRenderer, self._context)
        messages = GenerationEndpoint(MessagesRenderer, self._context)
        responses = ResponsesEndpoint(self._context)
        chat_item = api.post("ChatRequest", "ChatAnswer", "ChatChunk")
        completion_item = api.post("CompletionRequest", "CompletionAnswer", "CompletionAnswer")
        message_item = api.post_messages("MessagesRequest", "MessageAnswer", "MessageEvent")
        count_item = api.post_messages("CountTokensRequest", "CountTokensAnswer")
        response_item = api.post("ResponsesRequest", "ResponseAnswer", "ResponseEvent")
        stored = api.get("ResponseAnswer", "404")
        deleted = api.get("DeletedResponse", "404", method="delete")
        cancelled = api.get("ResponseAnswer", "400", "404", method="post")
        inputs = api.listed("InputItemList", *api.paging(20, MAX_ITEMS_LISTED))
        tokens_item = api.post("ResponsesRequest", "InputTokensAnswer")
        return [
            ApiRoute("/v1/chat/completions", chat, chat_item),
            ApiRoute("/v1/completions", completions, completion_item),
            ApiRoute(MESSAGES_PATH, messages, message_item),
            ApiRoute(f"{MESSAGES_PATH}/count_tokens", self._count_tokens, count_item, "messages"),
            ApiRoute("/v1/responses", responses, response_item),
            ApiRoute("/v1/responses/{response_id}", responses.stored, stored | deleted),
            ApiRoute("/v1/responses/{response_id}/cancel", responses.cancel, cancelled),
            ApiRoute("/v1/responses/{response_id}/input_items", responses.inputs, inputs),
            ApiRoute("/v1/responses/input_tokens", responses.count, tokens_item, "input"),
        ]

    def _other_routes(self, admin: AdminEndpoints) -> list[ApiRoute]:
        embeddings = GenerationEndpoint(EmbeddingsRenderer, self._context)
        embedding_item = api.post("EmbeddingsRequest", "EmbeddingsAnswer")
        recent = api.get("RequestList", "400")
        recent["parameters"] = [api.limit(RECENT_REQUESTS, KEPT_REQUESTS)]
        text_item = api.post("DetokenizeRequest", "DetokenizeAnswer")
        timing_item = api.get("RequestTiming", "404")
        targets: Json = {"type": "array", "items": api.reference("TargetGroup")}
        return [
            ApiRoute("/v1/embeddings", embeddings, embedding_item),
            ApiRoute("/v1/models", self._models, api.get("ModelList")),
            ApiRoute("/v1/models/{name:path}", self._model, api.get("ModelObject", "404"), "model"),
            *_admin_routes(admin),
            ApiRoute("/v1/cluster", self._cluster, api.get("StatusResponse")),
            ApiRoute("/v1/diagnosis", self._diagnosis, api.listed("Diagnosis", MODEL)),
            ApiRoute("/v1/trends", self._trends, api.listed("TrendsResponse", MODEL)),
            ApiRoute("/v1/requests", self._recent, recent, admin=True),
            ApiRoute("/v1/requests/{request_id:path}/timing", self._timing, timing_item),
            ApiRoute("/tokenize", self._tokenize, api.post("TokenizeRequest", "TokenizeAnswer")),
            ApiRoute("/detokenize", self._detokenize, text_item, "tokens"),
            ApiRoute("/tokenizer_info", self._tokenizer_info, api.listed("TokenizerInfo", MODEL)),
            ApiRoute("/health", _plain(lambda: {"status": "ok"}), api.get("HealthStatus")),
            ApiRoute("/ready", _plain(self._ready), api.get("HealthStatus", "503")),
            ApiRoute("/version", _plain(lambda: {"version": __version__}), api.get("Version")),
            ApiRoute("/metrics", self._metrics, api.get_content(STRING, kind="text/plain")),
            ApiRoute(TARGETS, self._targets, api.get_content(targets), admin=True),
            ApiRoute("/openapi.json", self._openapi, api.get_content({})),
        ]

    async def _not_found(self, http: HttpRequest, error: Exception) -> Response:
        path = shown(http.url.path)
        return await _refuse(
            http, HTTPException(404, f"there is no {path} here, only {self._served}")
        )

    async def _models(self, http: HttpRequest) -> Response:
        names = [*self._context.model_names(http.user)]
        models = [self._model_object(name) for name in names]
        return json_response({**list_fields(names), "data": models})

    async def _model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        if not name:
            return await self._models(http)
        self._context.find(name, http.user)
        return json_response(self._model_object(name))

    def _model_object(self, name: str) -> Json:
        served = self._context.models.find(name)
        embedding = served.embedding_model
        embeds = embedding is not None and name == embedding.name
        context = served.membership.context_length() or None  # no worker has said it yet
        model: Json = {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "baton",
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(served.created, UTC).isoformat(),
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
            "max_model_len": model.membership.context_length() or None,
        }
        return json_response({**answer, "rendered": rendered} if rendered else answer)

    async def _count_tokens(self, http: HttpRequest) -> Response:
        body = await parse_body(http, CountTokensRequest.parse, self._context.find_generating)
        serving = self._context.find(body.model, http.user).serving
        tokens, _ = await serving.tokenize(body.chat_prompt())
        return json_response({"input_tokens": len(tokens)})

    async def _detokenize(self, http: HttpRequest) -> Response:
        request = await parse_body(http, DetokenizeRequest.parse, self._context.find_generating)
        serving = self._context.find(request.model, http.user).serving
        text = await serving.detokenize(request.tokens, request.keep_special_tokens, "tokens")
        return json_response({"prompt": text})

    def _ready(self) -> Json:
        if self._context.activity.draining:
            raise Unavailable("this router is about to stop and takes no new requests")
        if not self._context.can_place:
            memberships = [model.membership for model in self._context.models]
            faults = [fault for each in memberships for role in Role for fault in each.faults(role)]
            raise none_ready("workers are", faults)
        return {"status": "ready"}

    async def _metrics(self, http: HttpRequest) -> Response:
        text = await asyncio.to_thread(generate_latest, self._registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _targets(self, http: HttpRequest) -> Response:
        """For Prometheus's http_sd_configs. A worker's series carry its name and role."""
        groups: list[TargetGroup] = [{"targets": self._overview.metrics_addresses(), "labels": {}}]
        return Response(encode(groups), media_type="application/json")

    async def _openapi(self, http: HttpRequest) -> Response:
        return Response(self.document, media_type="application/json")


def _batch_routes(batches: BatchEndpoints) -> list[ApiRoute]:
    errors = "400", "404"
    paging = api.paging(MAX_FILES_LISTED, MAX_FILES_LISTED)
    files = api.listed("FileList", *paging, api.query("purpose")) | api.upload("FileObject")
    file = api.get("FileObject", *errors) | api.get("DeletedFile", *errors, method="delete")
    content = api.get_content(STRING, *errors, kind="application/jsonl")
    listed = api.listed("BatchList", *api.paging(20, MAX_BATCHES_LISTED))
    created = api.post("BatchRequest", "BatchObject")
    batch, cancelled = (api.get("BatchObject", *errors, method=each) for each in ("get", "post"))
    return [
        ApiRoute("/v1/files", batches.files, files, "file"),
        ApiRoute("/v1/files/{file_id}", batches.file, file),
        ApiRoute("/v1/files/{file_id}/content", batches.content, content),
        ApiRoute("/v1/batches", batches.batches, listed | created),
        ApiRoute("/v1/batches/{batch_id}", batches.batch, batch),
        ApiRoute("/v1/batches/{batch_id}/cancel", batches.cancel, cancelled),
    ]


def _admin_routes(admin: AdminEndpoints) -> list[ApiRoute]:
    posts = {
        "/v1/models/load": (admin.load_model, "LoadModelRequest", "AddedModel"),
        "/v1/models/unload": (admin.unload_model, "UnloadModelRequest", "RemovedModel"),
        "/v1/load_lora_adapter": (admin.load_adapter, "LoadAdapterRequest", "LoadedAdapter"),
        "/v1/unload_lora_adapter": (admin.unload_adapter, "UnloadAdapterRequest", "RemovedAdapter"),
    }
    return [
        ApiRoute(path, endpoint, api.post(request, answer), admin=True)
        for path, (endpoint, request, answer) in posts.items()
    ]


def _cors(origins: Collection[str]) -> list[Middleware]:
    """Runs before the key check: a browser's preflight request has no key, and a page must be able
    to read a 401. Keys come in a header, so no cookies are allowed."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),  # SDKs send headers of their own
            expose_headers=("x-request-id", "request-id", "retry-after"),
        )
    ]


def _plain(get: Callable[[], Json]) -> Endpoint:
    async def endpoint(http: HttpRequest) -> Response:
        return json_response(get())

    return endpoint


async def _wrong_method(http: HttpRequest, error: Exception) -> Response:
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    message = (
        f"{shown(http.url.path)} takes {headers.get('Allow', 'no')} requests, not {http.method}"
    )
    return await _refuse(http, HTTPException(405, message, headers))


async def _refuse(http: HttpRequest, error: Exception) -> Response:
    return error_response(error, request_id_of(http), path=http.url.path)

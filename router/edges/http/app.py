"""All routes of the HTTP front door, and the endpoints that generate nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from baton.core.errors import NotServed, TokenOutOfRange, Unavailable, UnknownModel
from baton.core.types import Prompt
from baton.router.edges.http.answers import encode
from baton.router.edges.http.body import read_body
from baton.router.edges.http.chat import ChatApi
from baton.router.edges.http.completions import CompletionsApi
from baton.router.edges.http.endpoint import Door, GenerationEndpoint, request_id_of
from baton.router.edges.http.errors import problem
from baton.router.edges.http.fields import Json
from baton.router.edges.http.lock import OPEN, KeyLock
from baton.router.edges.http.openapi import document
from baton.router.edges.http.overview import OverviewApi
from baton.router.edges.http.static import Page
from baton.router.edges.http.tokens import KEEP_SPECIAL, TOKENS, read_prompt
from baton.router.observe.overview import Overview
from baton.router.workers.membership import Membership

Endpoint = Callable[[HttpRequest], Awaitable[Response]]


def answered(endpoint: Endpoint, prompt_field: str = "prompt") -> Endpoint:
    """An endpoint whose errors become responses, and whose responses carry an id."""

    async def call(http: HttpRequest) -> Response:
        request_id = request_id_of(http)
        try:
            response = await endpoint(http)
        except Exception as error:  # noqa: BLE001 the edge of the process
            return problem(error, request_id, prompt_field).response(request_id)
        response.headers["x-request-id"] = request_id
        return response

    return call


class HttpApp:
    """`app` is the ASGI application."""

    def __init__(
        self,
        door: Door,
        membership: Membership,
        overview: Overview,
        registry: CollectorRegistry,
        *,
        open_metrics: bool = False,
    ) -> None:
        self._door = door
        self._overview = OverviewApi(overview, door.keys)
        self._membership = membership
        self._registry = registry
        self._created = int(time.time())
        self._document = encode(document())
        self._page = Page()
        open_paths = (*OPEN, *self._page.paths, *(("/metrics",) if open_metrics else ()))
        self.app = Starlette(
            routes=self._routes(),
            middleware=[Middleware(KeyLock, keys=door.keys, open_paths=open_paths)],
            exception_handlers={HTTPException: _refused},
        )
        # A redirect would name this host as the caller called it.
        self.app.router.redirect_slashes = False

    def _routes(self) -> list[Route]:
        chat = GenerationEndpoint(ChatApi(), self._door)
        completions = GenerationEndpoint(CompletionsApi(), self._door)
        overview = self._overview
        return [
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/embeddings", answered(_embeddings), methods=["POST"]),
            Route("/v1/models", answered(self._models)),
            Route("/v1/models/{name:path}", answered(self._model, "model")),
            Route("/v1/cluster", answered(overview.cluster)),
            Route("/v1/diagnosis", answered(overview.diagnosis)),
            Route("/v1/trends", answered(overview.trends)),
            Route("/v1/requests", answered(overview.recent)),
            Route("/v1/requests/{request_id:path}/timing", answered(overview.timing)),
            Route("/tokenize", answered(self._tokenize), methods=["POST"]),
            Route("/detokenize", answered(self._detokenize, "tokens"), methods=["POST"]),
            Route("/health", answered(_health)),
            Route("/ready", answered(self._ready)),
            Route("/metrics", answered(self._metrics)),
            Route("/openapi.json", answered(self._openapi)),
            *self._page.routes,
        ]

    async def _models(self, http: HttpRequest) -> Response:
        return _json({"object": "list", "data": [self._described()]})

    async def _model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        if name != self._door.model:
            raise UnknownModel(f"there is no model {name!r} here", field="model")
        return _json(self._described())

    def _described(self) -> Json:
        return {
            "id": self._door.model,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": self._membership.context_length(),
        }

    async def _tokenize(self, http: HttpRequest) -> Response:
        prompt = await read_body(http, self._read_prompt)
        tokens, rendered = await self._door.serving.tokenize(prompt)
        told: Json = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": self._membership.context_length(),
        }
        return _json({**told, "rendered": rendered} if rendered else told)

    def _read_prompt(self, body: Json) -> Prompt:
        self._door.check_model(body)
        return read_prompt(body)

    async def _detokenize(self, http: HttpRequest) -> Response:
        tokens, keep_special = await read_body(http, self._read_tokens)
        return _json({"prompt": await self._door.serving.decode(tokens, keep_special)})

    def _read_tokens(self, body: Json) -> tuple[list[int], bool]:
        self._door.check_model(body)
        tokens = list(TOKENS.of(body))
        size = self._door.serving.text.vocabulary_size
        if tokens and max(tokens) >= size:
            raise TokenOutOfRange(
                f"token id {max(tokens)} is outside the vocabulary of {size}", field="tokens"
            )
        return tokens, KEEP_SPECIAL.of(body)

    async def _ready(self, http: HttpRequest) -> Response:
        if self._door.serving.draining:
            raise Unavailable("this router is about to stop and takes no new requests")
        if not self._door.serving.placer.can_place:
            raise Unavailable("no workers are ready")
        return _json({"status": "ready"})

    async def _metrics(self, http: HttpRequest) -> Response:
        text = await asyncio.to_thread(generate_latest, self._registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _openapi(self, http: HttpRequest) -> Response:
        return Response(self._document, media_type="application/json")


async def _health(http: HttpRequest) -> Response:
    return _json({"status": "ok"})


async def _embeddings(http: HttpRequest) -> Response:
    raise NotServed("embeddings are not served here; this cluster generates text")


async def _refused(http: HttpRequest, error: Exception) -> Response:
    """No such path, or not with this method."""
    request_id = request_id_of(http)
    return problem(error, request_id).response(request_id)


def _json(content: Json) -> Response:
    return Response(encode(content), media_type="application/json")

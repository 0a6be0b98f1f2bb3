"""/v1/responses, and the endpoints of stored responses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from baton.core.proto_json import Json
from baton.core.types import Request
from baton.router.edges.auth import Caller
from baton.router.edges.edge_context import EdgeContext
from baton.router.edges.http.endpoint import GenerationEndpoint, catch_errors, json_response
from baton.router.edges.http.responses.response_store import ResponseStore
from baton.router.edges.http.responses.responses_renderer import ResponsesRenderer
from baton.router.edges.http.responses.responses_request import ResponsesRequest
from baton.router.served_models import ServedModel

PATH = "/v1/responses"


class ResponsesEndpoint(GenerationEndpoint[ResponsesRequest]):
    def __init__(self, context: EdgeContext, store: ResponseStore) -> None:
        super().__init__(ResponsesRenderer, context)
        self._store = store

    def _parse(
        self, content: Json, request_id: str, caller: Caller
    ) -> tuple[ResponsesRequest, tuple[Request, ...], ServedModel]:
        """With the conversation that the response follows."""
        body, (request,), model = super()._parse(content, request_id, caller)
        if not body.previous_response_id:
            return body, (request,), model
        history = self._store.conversation(caller.key.name, body.previous_response_id)
        return body, (dataclasses.replace(request, prompt=body.chat_prompt(history)),), model

    def _render(
        self, body: ResponsesRequest, requests: Sequence[Request], caller: Caller
    ) -> ResponsesRenderer:
        renderer = ResponsesRenderer(body, requests)
        if body.store:
            renderer.store_in(self._store, caller.key.name)
        return renderer


def responses_routes(context: EdgeContext) -> list[Route]:
    store = ResponseStore()

    async def stored(http: HttpRequest) -> Response:
        owner, response_id = http.user.key.name, http.path_params["response_id"]
        if http.method != "DELETE":
            return Response(store.body(owner, response_id), media_type="application/json")
        store.delete(owner, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(http: HttpRequest) -> Response:
        body = store.cancel(http.user.key.name, http.path_params["response_id"])
        return Response(body, media_type="application/json")

    one = f"{PATH}/{{response_id}}"
    return [
        Route(PATH, ResponsesEndpoint(context, store), methods=["POST"]),
        # One route for both: a refused method's Allow header lists those of its route.
        Route(one, catch_errors(stored), methods=["GET", "DELETE"]),
        Route(f"{one}/cancel", catch_errors(cancel), methods=["POST"]),
    ]

"""Endpoints that let admins add and remove models and adapters while the cluster runs.

Model paths are llama.cpp's, adapter bodies are vLLM's. `GET /v1/models` lists both, and
`GET /v1/cluster` says which models are ready.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from baton.router.edges.edge_context import EdgeContext
from baton.router.edges.http.body import parse_body
from baton.router.edges.http.endpoint import json_response
from baton.router.edges.http.generation_request import ShortText
from baton.router.edges.http.http_errors import fields_named
from baton.router.edges.http.request_model import RequestModel, about
from baton.router.followed_models import FollowedModels
from baton.v1 import cluster_pb2 as pb


class LoadModelRequest(RequestModel):
    model: ShortText = about("The name that requests use.", ...)
    path: ShortText = about("A folder, a GGUF file, or a hub's model.", ...)
    config: dict[str, Any] = about(
        'Configuration of this model alone, such as {"decode": {"workers": 2}}.', {}
    )


class UnloadModelRequest(RequestModel):
    model: ShortText = about("The model's name.", ...)


class LoadAdapterRequest(RequestModel):
    lora_name: ShortText = about("The name that requests use.", ...)
    lora_path: ShortText = about(
        "A PEFT folder or a hub's repository that the configuration allows.", ...
    )
    base_model_name: ShortText = about("Its model; required if several are served.", "")


class UnloadAdapterRequest(RequestModel):
    lora_name: ShortText = about("The adapter's name.", ...)


class AdminEndpoints:
    def __init__(self, followed: FollowedModels, context: EdgeContext) -> None:
        self._followed = followed
        self._controller, self._models = context.controller, context.models

    async def load_model(self, http: HttpRequest) -> Response:
        body = await parse_body(http, LoadModelRequest.parse)
        keys = json.dumps({**body.config, "model": body.path})
        with fields_named(name="model", models="model", model="path"):
            await self._followed.ask_to_add(pb.NamedModel(name=body.model, keys=keys))
        return json_response({"model": body.model, "added": True})

    async def unload_model(self, http: HttpRequest) -> Response:
        body = await parse_body(http, UnloadModelRequest.parse)
        await self._followed.ask_to_remove(body.model)
        return json_response({"model": body.model, "removed": True})

    async def load_adapter(self, http: HttpRequest) -> Response:
        body = await parse_body(http, LoadAdapterRequest.parse)
        name, path, base = body.lora_name, body.lora_path, body.base_model_name
        with fields_named(name="lora_name", model="base_model_name"):
            adapter = await self._controller.add_adapter(self._models, name, path, base)
        return json_response({"lora_name": name, "digest": adapter.digest.hex()})

    async def unload_adapter(self, http: HttpRequest) -> Response:
        body = await parse_body(http, UnloadAdapterRequest.parse)
        await self._controller.remove_adapter(self._models, body.lora_name)
        return json_response({"lora_name": body.lora_name, "removed": True})

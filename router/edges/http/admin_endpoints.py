"""Admins add and remove models and adapters while the cluster runs.

Paths of models are llama.cpp's, bodies of adapters vLLM's. `GET /v1/models` lists both, and
`GET /v1/cluster` says which models are ready.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from baton.router.edges.edge_context import EdgeContext
from baton.router.edges.http.body import parse_body
from baton.router.edges.http.endpoint import catch_errors, json_response
from baton.router.edges.http.generation_request import ShortText
from baton.router.edges.http.request_model import RequestModel, about
from baton.router.followed_models import FollowedModels
from baton.v1 import cluster_pb2 as pb

LOAD_MODEL, UNLOAD_MODEL = "/v1/models/load", "/v1/models/unload"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class LoadModelRequest(RequestModel):
    model: ShortText = about("What requests give as their model.", ...)
    path: ShortText = about("A folder, a GGUF file, or a hub's model.", ...)
    config: dict[str, Any] = about(
        'Keys of its own, such as {"decode": {"workers": 2}}; others are shared.', {}
    )


class UnloadModelRequest(RequestModel):
    model: ShortText = about("The model's name.", ...)


class LoadAdapterRequest(RequestModel):
    lora_name: ShortText = about("What requests give as their model.", ...)
    lora_path: ShortText = about(
        "A folder of PEFT or a hub's repository, as the configuration allows.", ...
    )
    base_model_name: ShortText = about("Its model; needed where several are served.", "")


class UnloadAdapterRequest(RequestModel):
    lora_name: ShortText = about("The adapter's name.", ...)


def model_routes(followed: FollowedModels) -> list[Route]:
    async def load(http: HttpRequest) -> Response:
        body = await parse_body(http, LoadModelRequest.parse)
        keys = json.dumps({**body.config, "model": body.path})
        await followed.ask_to_add(pb.NamedModel(name=body.model, keys=keys))
        return json_response({"model": body.model, "added": True})

    async def unload(http: HttpRequest) -> Response:
        body = await parse_body(http, UnloadModelRequest.parse)
        await followed.ask_to_remove(body.model)
        return json_response({"model": body.model, "removed": True})

    return [
        Route(LOAD_MODEL, catch_errors(load), methods=["POST"]),
        Route(UNLOAD_MODEL, catch_errors(unload), methods=["POST"]),
    ]


def adapter_routes(context: EdgeContext) -> list[Route]:
    controller, models = context.controller, context.models

    async def load(http: HttpRequest) -> Response:
        body = await parse_body(http, LoadAdapterRequest.parse)
        base = body.base_model_name
        adapter = await controller.add_adapter(models, body.lora_name, body.lora_path, base)
        return json_response({"lora_name": body.lora_name, "digest": adapter.digest.hex()})

    async def unload(http: HttpRequest) -> Response:
        body = await parse_body(http, UnloadAdapterRequest.parse)
        await controller.remove_adapter(models, body.lora_name)
        return json_response({"lora_name": body.lora_name, "removed": True})

    return [
        Route(LOAD_ADAPTER, catch_errors(load), methods=["POST"]),
        Route(UNLOAD_ADAPTER, catch_errors(unload), methods=["POST"]),
    ]

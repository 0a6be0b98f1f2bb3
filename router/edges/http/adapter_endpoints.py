"""Adapters are added and removed while the cluster runs, by admins: bodies as vLLM's."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from baton.router.edges.edge_context import EdgeContext
from baton.router.edges.http.body import parse_body
from baton.router.edges.http.endpoint import answered, json_response
from baton.router.edges.http.generation_request import ShortText
from baton.router.edges.http.request_model import RequestModel, about

LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class LoadAdapterRequest(RequestModel):
    lora_name: ShortText = about("What requests give as their model.", ...)
    lora_path: ShortText = about(
        "A folder of PEFT or a hub's repository, as the configuration allows.", ...
    )
    base_model_name: ShortText = about("Its model; needed where several are served.", "")


class UnloadAdapterRequest(RequestModel):
    lora_name: ShortText = about("The adapter's name.", ...)


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
        Route(LOAD_ADAPTER, answered(load), methods=["POST"]),
        Route(UNLOAD_ADAPTER, answered(unload), methods=["POST"]),
    ]

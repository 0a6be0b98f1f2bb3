"""API routes with their OpenAPI operations, and the document made from these, the answer types and
the request body models."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from starlette.routing import Route

from baton import __version__
from baton.core.proto_json import Json, json_schema
from baton.router.edges.http.admin_endpoints import (
    LoadAdapterRequest,
    LoadModelRequest,
    UnloadAdapterRequest,
    UnloadModelRequest,
)
from baton.router.edges.http.answer_types import (
    AddedModel,
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    DetokenizeAnswer,
    ErrorBody,
    HealthStatus,
    LoadedAdapter,
    MessagesErrorBody,
    ModelList,
    RemovedAdapter,
    RemovedModel,
    TargetGroup,
    TokenizeAnswer,
    TokenizerInfo,
    Version,
)
from baton.router.edges.http.batches.batch_endpoints import (
    MAX_FORM_FIELDS,
    BatchList,
    DeletedFile,
    FileList,
)
from baton.router.edges.http.batches.batch_store import LEAST_EXPIRY, MAX_EXPIRY, BatchRequest
from baton.router.edges.http.chat_request import (
    ChatRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from baton.router.edges.http.completion_request import CompletionRequest
from baton.router.edges.http.embeddings import EmbeddingsAnswer, EmbeddingsRequest
from baton.router.edges.http.endpoint import Endpoint, GenerationEndpoint, catch_errors
from baton.router.edges.http.http_errors import OVERLOADED_STATUS
from baton.router.edges.http.messages.messages_renderer import (
    CountTokensAnswer,
    MessageAnswer,
    MessageEvent,
)
from baton.router.edges.http.messages.messages_request import CountTokensRequest, MessagesRequest
from baton.router.edges.http.responses.input_items import InputItemList, InputTokensAnswer
from baton.router.edges.http.responses.responses_renderer import (
    DeletedResponse,
    ResponseAnswer,
    ResponseEvent,
)
from baton.router.edges.http.responses.responses_request import ResponsesRequest
from baton.v1 import cluster_pb2, timing_pb2

STRING: Json = {"type": "string"}
_COMPONENT = "#/components/schemas/{model}"
_STATUSES = {
    "400": "A field is wrong or not served.",
    "401": "The API key is missing or unknown.",
    "404": "No such model or request.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "Too many requests; Retry-After says when to try again.",
    "500": "The server failed.",
    "503": "No worker can take the request now.",
    "504": "The request took too long.",
}


_REQUESTS = (
    *(ChatRequest, CompletionRequest, MessagesRequest, CountTokensRequest),
    *(ResponsesRequest, TokenizeRequest, DetokenizeRequest, BatchRequest, EmbeddingsRequest),
    *(LoadAdapterRequest, UnloadAdapterRequest, LoadModelRequest, UnloadModelRequest),
)
_ANSWERS = (
    *(ChatAnswer, ChatChunk, CompletionAnswer, ModelList, TokenizeAnswer, DetokenizeAnswer),
    *(TokenizerInfo, TargetGroup, HealthStatus, Version, ErrorBody, MessagesErrorBody),
    *(MessageAnswer, MessageEvent, CountTokensAnswer, EmbeddingsAnswer),
    *(ResponseAnswer, ResponseEvent, DeletedResponse, FileList, DeletedFile, BatchList),
    *(InputItemList, InputTokensAnswer),
    *(LoadedAdapter, RemovedAdapter, AddedModel, RemovedModel),
)
# Rendered by core/proto_json.py.
_MESSAGES = (
    cluster_pb2.StatusResponse,
    cluster_pb2.Diagnosis,
    cluster_pb2.TrendsResponse,
    timing_pb2.RequestTiming,
)


class ApiRoute(NamedTuple):
    """One route for all methods of a path, since the Allow header of a 405 lists one route's."""

    path: str
    endpoint: Endpoint | GenerationEndpoint[Any]
    item: Json  # the path's item in the document, by method
    prompt_field: str = "prompt"
    admin: bool = False  # needs an admin's API key

    def route(self) -> Route:
        """For Starlette."""
        endpoint, methods = self.endpoint, [each for each in self.item if each != "parameters"]
        if not isinstance(endpoint, GenerationEndpoint):
            endpoint = catch_errors(endpoint, self.prompt_field)
        return Route(self.path, endpoint, methods=methods)

    def documented(self) -> tuple[str, Json]:
        path = self.path.replace(":path", "")
        names = re.findall(r"{(\w+)}", path)
        named = [{"name": name, "in": "path", "required": True, "schema": STRING} for name in names]
        return path, {**self.item, "parameters": named} if named else self.item


def document(routes: Iterable[ApiRoute]) -> Json:
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": __version__},
        "paths": dict(each.documented() for each in routes),
        "components": components(),
    }


@functools.cache
def components() -> Json:
    timings = {"type": "array", "items": reference("RequestTiming")}
    schemas = {
        **_definitions(_REQUESTS),
        **{
            name: {**schema, "additionalProperties": False}
            for name, schema in _definitions(_ANSWERS).items()
        },
        **{message.DESCRIPTOR.name: json_schema(message) for message in _MESSAGES},
        "RequestList": {
            "type": "object",
            "properties": {"object": {"const": "list"}, "data": timings},
            "required": ["object", "data"],
            "additionalProperties": False,
        },
    }
    return {"schemas": schemas}


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: object) -> bool:
        return False


def _definitions(types: tuple[type, ...]) -> dict[str, Json]:
    inputs: list[tuple[type, JsonSchemaMode, TypeAdapter[object]]] = [
        (each, "validation", TypeAdapter(each)) for each in types
    ]
    _, schemas = TypeAdapter.json_schemas(
        inputs, ref_template=_COMPONENT, schema_generator=_Untitled
    )
    definitions: dict[str, Json] = schemas["$defs"]
    return definitions


def reference(name: str) -> Json:
    return {"$ref": _COMPONENT.format(model=name)}


def post(request: str, answer: str, chunk: str = "", errors: Json | None = None) -> Json:
    content: Json = {"application/json": {"schema": reference(answer)}}
    if chunk:
        content["text/event-stream"] = {"schema": _event(chunk)}
    body: Json = {
        "required": True,
        "content": {"application/json": {"schema": reference(request)}},
    }
    success: Json = {"200": {"description": "The answer.", "content": content}}
    return {
        "post": {"requestBody": body, "responses": {**success, **(errors or _errors(*_STATUSES))}}
    }


def post_messages(request: str, answer: str, chunk: str = "") -> Json:
    errors = _errors(*_STATUSES, body="MessagesErrorBody")
    errors[str(OVERLOADED_STATUS)] = errors.pop("503")
    return post(request, answer, chunk, errors)


def upload(answer: str) -> Json:
    form: Json = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": _UPLOAD,
        "additionalProperties": STRING,
        "maxProperties": MAX_FORM_FIELDS + 1,  # and the file
    }
    body: Json = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    responses = _responses(reference(answer), "400", "401", "408", "413", "415", "429")
    return {"post": {"requestBody": body, "responses": responses}}


def _event(chunk: str) -> Json:
    """Schema of a server-sent event."""
    data: Json = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": reference(chunk),
        "description": "An error if the event is called error.",
    }
    properties = {"data": {"anyOf": [{"const": "[DONE]"}, data]}, "event": STRING}
    return {"type": "object", "properties": properties, "required": ["data"]}


def get(answer: str, *errors: str, method: str = "get") -> Json:
    """A path's item with GET, or with another method that has no body."""
    return {method: {"responses": _responses(reference(answer), *errors)}}


def get_content(schema: Json, *errors: str, kind: str = "application/json") -> Json:
    return {"get": {"responses": _responses(schema, *errors, kind=kind)}}


def listed(answer: str, *parameters: Json) -> Json:
    responses = _responses(reference(answer), "400", "404")
    return {"get": {"parameters": list(parameters), "responses": responses}}


def _responses(schema: Json, *errors: str, kind: str = "application/json") -> Json:
    success: Json = {"description": "The answer.", "content": {kind: {"schema": schema}}}
    return {"200": success, **_errors(*errors)}


def _errors(*statuses: str, body: str = "ErrorBody") -> Json:
    content = {"application/json": {"schema": reference(body)}}
    return {status: {"description": _STATUSES[status], "content": content} for status in statuses}


def query(name: str) -> Json:
    return {"name": name, "in": "query", "schema": STRING}


def limit(default: int, most: int) -> Json:
    schema = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return {**query("limit"), "schema": schema}


def paging(default: int, most: int) -> tuple[Json, ...]:
    """The parameters of paging.py, with a list's default limit and its greatest."""
    order = {"type": "string", "enum": ["asc", "desc"], "default": "desc"}
    return limit(default, most), query("after"), {**query("order"), "schema": order}


_UPLOAD: Json = {
    "file": {"type": "string", "format": "binary", "description": "Requests, one a line."},
    "purpose": {"const": "batch"},
    "expires_after[seconds]": {"type": "integer", "minimum": LEAST_EXPIRY, "maximum": MAX_EXPIRY},
}

"""The OpenAPI document, made from the types of answers and the models of bodies."""

from __future__ import annotations

import functools

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode

from baton import __version__
from baton.core.proto_json import Json, json_schema
from baton.router.edges.http.admin_endpoints import (
    LOAD_ADAPTER,
    LOAD_MODEL,
    UNLOAD_ADAPTER,
    UNLOAD_MODEL,
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
    MAX_BATCHES_LISTED,
    MAX_EXPIRY,
    MAX_FILES_LISTED,
    MAX_FORM_FIELDS,
    BatchList,
    BatchRequest,
    DeletedFile,
    FileList,
)
from baton.router.edges.http.chat_request import (
    ChatRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from baton.router.edges.http.completion_request import CompletionRequest
from baton.router.edges.http.embeddings import EmbeddingsAnswer, EmbeddingsRequest
from baton.router.edges.http.http_errors import OVERLOADED_STATUS
from baton.router.edges.http.messages.messages_renderer import (
    CountTokensAnswer,
    MessageAnswer,
    MessageEvent,
)
from baton.router.edges.http.messages.messages_request import CountTokensRequest, MessagesRequest
from baton.router.edges.http.responses.responses_renderer import (
    DeletedResponse,
    ResponseAnswer,
    ResponseEvent,
)
from baton.router.edges.http.responses.responses_request import ResponsesRequest
from baton.router.observe.ledger import KEPT_REQUESTS
from baton.router.observe.overview import RECENT_REQUESTS
from baton.v1 import cluster_pb2, timing_pb2

_STRING: Json = {"type": "string"}
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
    *(LoadedAdapter, RemovedAdapter, AddedModel, RemovedModel),
)
# Rendered by core/proto_json.py.
_MESSAGES = (
    cluster_pb2.StatusResponse,
    cluster_pb2.Diagnosis,
    cluster_pb2.TrendsResponse,
    timing_pb2.RequestTiming,
)


@functools.cache
def document() -> Json:
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": __version__},
        "paths": _paths(),
        "components": {"schemas": _schemas()},
    }


def _paths() -> Json:
    targets: Json = {"type": "array", "items": _reference("TargetGroup")}
    return {
        "/v1/chat/completions": _post("ChatRequest", "ChatAnswer", "ChatChunk"),
        "/v1/completions": _post("CompletionRequest", "CompletionAnswer", "CompletionAnswer"),
        "/v1/messages": _messages("MessagesRequest", "MessageAnswer", "MessageEvent"),
        "/v1/messages/count_tokens": _messages("CountTokensRequest", "CountTokensAnswer"),
        "/v1/responses": _post("ResponsesRequest", "ResponseAnswer", "ResponseEvent"),
        "/v1/responses/{response_id}": _named(_STORED, "response_id"),
        "/v1/responses/{response_id}/cancel": _named(
            {"post": _get("ResponseAnswer", "400", "404")["get"]}, "response_id"
        ),
        **_batch_paths(),
        "/v1/embeddings": _post("EmbeddingsRequest", "EmbeddingsAnswer"),
        "/v1/models": _get("ModelList"),
        "/v1/models/{name}": _named(_get("ModelObject", "404"), "name"),
        LOAD_MODEL: _post("LoadModelRequest", "AddedModel"),
        UNLOAD_MODEL: _post("UnloadModelRequest", "RemovedModel"),
        LOAD_ADAPTER: _post("LoadAdapterRequest", "LoadedAdapter"),
        UNLOAD_ADAPTER: _post("UnloadAdapterRequest", "RemovedAdapter"),
        "/v1/cluster": _get("StatusResponse"),
        "/v1/diagnosis": _listed("Diagnosis", _query("model")),
        "/v1/trends": _listed("TrendsResponse", _query("model")),
        "/v1/requests": {
            **_get("RequestList", "400"),
            "parameters": [_limit(RECENT_REQUESTS, KEPT_REQUESTS)],
        },
        "/v1/requests/{request_id}/timing": _named(_get("RequestTiming", "404"), "request_id"),
        "/tokenize": _post("TokenizeRequest", "TokenizeAnswer"),
        "/detokenize": _post("DetokenizeRequest", "DetokenizeAnswer"),
        "/tokenizer_info": _listed("TokenizerInfo", _query("model")),
        "/health": _get("HealthStatus"),
        "/ready": _get("HealthStatus", "503"),
        "/version": _get("Version"),
        "/metrics": {"get": {"responses": {"200": _content("text/plain", _STRING)}}},
        "/metrics/targets": {"get": {"responses": {"200": _content("application/json", targets)}}},
        "/openapi.json": {"get": {"responses": {"200": _content("application/json", {})}}},
    }


def _batch_paths() -> Json:
    limit = _limit(MAX_FILES_LISTED, MAX_FILES_LISTED)
    upload: Json = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": _UPLOAD,
        "additionalProperties": _STRING,
        "maxProperties": MAX_FORM_FIELDS + 1,  # and the file
    }
    body: Json = {"required": True, "content": {"multipart/form-data": {"schema": upload}}}
    uploaded = {"200": _content("application/json", _reference("FileObject"))}
    refused = _errors("400", "401", "408", "413", "415", "429")
    content = {"200": _content("application/jsonl", _STRING), **_errors("400", "404")}
    one: Json = {
        **_get("FileObject", "400", "404"),
        "delete": _get("DeletedFile", "400", "404")["get"],
    }
    return {
        "/v1/files": {
            **_listed("FileList", limit, *map(_query, ("after", "order", "purpose"))),
            "post": {"requestBody": body, "responses": {**uploaded, **refused}},
        },
        "/v1/files/{file_id}": _named(one, "file_id"),
        "/v1/files/{file_id}/content": _named({"get": {"responses": content}}, "file_id"),
        "/v1/batches": {
            **_listed("BatchList", _limit(20, MAX_BATCHES_LISTED), _query("after")),
            **_post("BatchRequest", "BatchObject"),
        },
        "/v1/batches/{batch_id}": _named(_get("BatchObject", "400", "404"), "batch_id"),
        "/v1/batches/{batch_id}/cancel": _named(
            {"post": _get("BatchObject", "400", "404")["get"]}, "batch_id"
        ),
    }


def _schemas() -> Json:
    timings = {"type": "array", "items": _reference("RequestTiming")}
    return {
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


def _reference(name: str) -> Json:
    return {"$ref": _COMPONENT.format(model=name)}


def _content(kind: str, schema: Json) -> Json:
    return {"description": "The answer.", "content": {kind: {"schema": schema}}}


def _post(request: str, answer: str, chunk: str = "", errors: Json | None = None) -> Json:
    content: Json = {"application/json": {"schema": _reference(answer)}}
    if chunk:
        content["text/event-stream"] = {"schema": _event(chunk)}
    body: Json = {
        "required": True,
        "content": {"application/json": {"schema": _reference(request)}},
    }
    success: Json = {"200": {"description": "The answer.", "content": content}}
    return {
        "post": {"requestBody": body, "responses": {**success, **(errors or _errors(*_STATUSES))}}
    }


def _messages(request: str, answer: str, chunk: str = "") -> Json:
    errors = _errors(*_STATUSES, body="MessagesErrorBody")
    errors[str(OVERLOADED_STATUS)] = errors.pop("503")
    return _post(request, answer, chunk, errors)


def _event(chunk: str) -> Json:
    """One server-sent event."""
    data: Json = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": _reference(chunk),
        "description": "In an event called error, an error.",
    }
    properties = {"data": {"anyOf": [{"const": "[DONE]"}, data]}, "event": _STRING}
    return {"type": "object", "properties": properties, "required": ["data"]}


def _get(answer: str, *errors: str) -> Json:
    success: Json = {"200": _content("application/json", _reference(answer))}
    return {"get": {"responses": {**success, **_errors(*errors)}}}


def _errors(*statuses: str, body: str = "ErrorBody") -> Json:
    content = {"application/json": {"schema": _reference(body)}}
    return {status: {"description": _STATUSES[status], "content": content} for status in statuses}


def _listed(answer: str, *parameters: Json) -> Json:
    success: Json = {"200": _content("application/json", _reference(answer))}
    responses = {**success, **_errors("400", "404")}
    return {"get": {"parameters": list(parameters), "responses": responses}}


def _query(name: str) -> Json:
    return {"name": name, "in": "query", "schema": _STRING}


def _limit(default: int, most: int) -> Json:
    schema = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return {**_query("limit"), "schema": schema}


def _named(path: Json, name: str) -> Json:
    parameter = {"name": name, "in": "path", "required": True, "schema": _STRING}
    return {**path, "parameters": [parameter]}


_STORED: Json = {
    **_get("ResponseAnswer", "404"),
    "delete": _get("DeletedResponse", "404")["get"],
}
_UPLOAD: Json = {
    "file": {"type": "string", "format": "binary", "description": "Requests, one a line."},
    "purpose": {"const": "batch"},
    "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": MAX_EXPIRY},
}

"""The OpenAPI document: made of the fields that read the bodies, so that both say the same."""

from __future__ import annotations

from google.protobuf.message import Message

from baton.core.proto_json import json_schema
from baton.router.edges.http import (
    chat,
    completions,
    generation,
    logprobs,
    overview,
    structure,
    tokens,
    tools,
)
from baton.router.edges.http.fields import TOKEN_ID_SCHEMA, Field, Json
from baton.router.edges.http.schemas import described, exact, list_of, object_of, or_null
from baton.v1 import cluster_pb2, timing_pb2

TITLE = "Baton"
VERSION = "1"

# Told as core/proto_json.py writes them.
_MESSAGES = (
    cluster_pb2.StatusResponse,
    cluster_pb2.Diagnosis,
    cluster_pb2.TrendsResponse,
    timing_pb2.RequestTiming,
)

_INTEGER: Json = {"type": "integer"}
_STRING: Json = {"type": "string"}
_FINISH: Json = {"enum": ["stop", "length", "tool_calls"]}
# What no status of its own is written for.
_ERROR_STATUSES = {
    "400": "A field is wrong or not served.",
    "401": "The API key is missing or not known.",
    "404": "No such model or request.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "Too much is asked at once; Retry-After says when to try again.",
    "500": "The server failed.",
    "503": "No worker can take it now.",
    "504": "It took too long.",
}


def document() -> Json:
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": VERSION},
        "paths": _paths(),
        "components": {"schemas": _schemas()},
    }


def _paths() -> Json:
    return {
        "/v1/chat/completions": _post("ChatRequest", "ChatAnswer", "ChatChunk"),
        "/v1/completions": _post("CompletionRequest", "CompletionAnswer", "CompletionAnswer"),
        "/v1/embeddings": {"post": {"responses": _errors("400")}},
        "/v1/models": _get("Models"),
        "/v1/models/{name}": _named(_get("Model", "404")),
        "/v1/cluster": _get("StatusResponse"),
        "/v1/diagnosis": _get("Diagnosis"),
        "/v1/trends": _get("TrendsResponse"),
        "/v1/requests": _with_query(_get("Requests", "400"), overview.LIMIT),
        "/v1/requests/{request_id}/timing": _named(_get("RequestTiming", "404"), "request_id"),
        "/tokenize": _post("TokenizeRequest", "TokenizeAnswer"),
        "/detokenize": _post("DetokenizeRequest", "DetokenizeAnswer"),
        "/health": _get("Status"),
        "/ready": _get("Status", "503"),
        "/metrics": {"get": {"responses": {"200": _content("text/plain", _STRING)}}},
        "/openapi.json": {"get": {"responses": {"200": _content("application/json", {})}}},
    }


def _schemas() -> Json:
    return {
        "ChatRequest": object_of(
            {
                "messages": chat.MESSAGES_SCHEMA,
                "tools": tools.TOOLS_SCHEMA,
                "tool_choice": tools.CHOICE_SCHEMA,
                **_generation(),
            },
            required=["messages"],
            fields=(*chat.READ, *chat.UNSERVED),
        ),
        "CompletionRequest": object_of(
            {"prompt": completions.PROMPT_SCHEMA, **_generation()},
            required=["prompt"],
            fields=(*completions.READ, *completions.UNSERVED),
        ),
        "ChatAnswer": _answer("chat.completion", _CHAT_CHOICE, whole=True),
        "ChatChunk": _answer("chat.completion.chunk", _CHAT_DELTA),
        "CompletionAnswer": _answer("text_completion", _COMPLETION_CHOICE),
        "Usage": _USAGE,
        "Model": _MODEL,
        "Models": exact({"object": {"const": "list"}, "data": list_of(_reference("Model"))}),
        "TokenizeRequest": object_of(
            {
                "prompt": {"type": ["string", "null"]},
                "messages": or_null(chat.MESSAGES_SCHEMA),
                "tools": tools.TOOLS_SCHEMA,
                "tool_choice": tools.CHOICE_SCHEMA,
            },
            fields=(generation.MODEL, tokens.ADD_SPECIAL),
        ),
        "TokenizeAnswer": object_of(
            {
                "tokens": list_of(TOKEN_ID_SCHEMA),
                "count": _INTEGER,
                "max_model_len": _INTEGER,
                "rendered": _STRING,
            },
            required=["tokens", "count", "max_model_len"],
        ),
        "DetokenizeRequest": object_of(
            {}, fields=(generation.MODEL, tokens.TOKENS, tokens.KEEP_SPECIAL)
        ),
        "DetokenizeAnswer": exact({"prompt": _STRING}),
        **_messages(*_MESSAGES),
        "Requests": exact(
            {"object": {"const": "list"}, "data": list_of(_reference("RequestTiming"))}
        ),
        "Status": exact({"status": _STRING}),
        "Error": _ERROR,
    }


def _messages(*messages: type[Message]) -> Json:
    return {message.DESCRIPTOR.name: json_schema(message) for message in messages}


def _generation() -> Json:
    return {
        "stream_options": generation.STREAM_OPTIONS_SCHEMA,
        "response_format": structure.FORMAT_SCHEMA,
        **described(generation.READ),
        **described(generation.UNSERVED),
    }


def _reference(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _answer(kind: str, choice: Json, *, whole: bool = False) -> Json:
    """A chunk has the usage only in the end, and only where it is asked for."""
    usage = _reference("Usage")
    properties = {
        "id": _STRING,
        "object": {"const": kind},
        "created": _INTEGER,
        "model": _STRING,
        "choices": list_of(choice),
    }
    if whole:
        return exact({**properties, "usage": usage})
    with_usage = {**properties, "usage": or_null(usage)}
    return {**exact(with_usage), "required": list(properties)}


def _choice(properties: Json, logprobs: Json, finish: Json) -> Json:
    common: Json = {"index": _INTEGER, "logprobs": logprobs, "finish_reason": finish}
    return exact({**properties, **common})


_MESSAGE = object_of(
    {
        "role": {"const": "assistant"},
        "content": or_null(_STRING),
        "refusal": {"type": "null"},
        "reasoning_content": _STRING,
        "tool_calls": tools.CALLS_SCHEMA,
    },
    required=["role", "content", "refusal"],
)
_DELTA = object_of(
    {
        "role": {"const": "assistant"},
        "content": or_null(_STRING),
        "reasoning_content": _STRING,
        "tool_calls": tools.CALL_DELTAS_SCHEMA,
    }
)
_CHAT_CHOICE = _choice({"message": _MESSAGE}, logprobs.CHAT_SCHEMA, _FINISH)
_CHAT_DELTA = _choice({"delta": _DELTA}, logprobs.CHAT_SCHEMA, or_null(_FINISH))
_COMPLETION_CHOICE = object_of(
    {
        "index": _INTEGER,
        "text": _STRING,
        "logprobs": logprobs.COMPLETION_SCHEMA,
        "finish_reason": or_null(_FINISH),
        "prompt_logprobs": logprobs.PROMPT_SCHEMA,
    },
    required=["index", "text", "logprobs", "finish_reason"],
)

_USAGE = exact(
    {
        "prompt_tokens": _INTEGER,
        "completion_tokens": _INTEGER,
        "total_tokens": _INTEGER,
        "prompt_tokens_details": exact({"cached_tokens": _INTEGER}),
    }
)

_MODEL = exact(
    {
        "id": _STRING,
        "object": {"const": "model"},
        "created": _INTEGER,
        "owned_by": _STRING,
        "max_model_len": _INTEGER,
    }
)

_ERROR = exact(
    {
        "error": exact(
            {
                "message": _STRING,
                "type": _STRING,
                "param": or_null(_STRING),
                "code": or_null(_STRING),
            }
        )
    }
)


def _post(request: str, answer: str, chunk: str = "") -> Json:
    content = {"application/json": {"schema": _reference(answer)}}
    if chunk:
        content["text/event-stream"] = {"schema": _event(chunk)}
    body = {"required": True, "content": {"application/json": {"schema": _reference(request)}}}
    success: Json = {"200": {"description": "The answer.", "content": content}}
    return {"post": {"requestBody": body, "responses": {**success, **_errors(*_ERROR_STATUSES)}}}


def _event(chunk: str) -> Json:
    """One server-sent event."""
    told: Json = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": _reference(chunk),
        "description": "In an event called error, an error.",
    }
    data: Json = {"anyOf": [{"const": "[DONE]"}, told]}
    return object_of({"data": data, "event": _STRING}, required=["data"])


def _get(answer: str, *errors: str) -> Json:
    success: Json = {"200": _content("application/json", _reference(answer))}
    return {"get": {"responses": {**success, **_errors(*errors)}}}


def _named(path: Json, name: str = "name") -> Json:
    parameter = {"name": name, "in": "path", "required": True, "schema": _STRING}
    return {**path, "parameters": [parameter]}


def _with_query(path: Json, field: Field) -> Json:
    parameter = {"name": field.name, "in": "query", "schema": field.schema}
    return {**path, "parameters": [parameter]}


def _content(kind: str, schema: Json) -> Json:
    return {"description": "The answer.", "content": {kind: {"schema": schema}}}


def _errors(*statuses: str) -> Json:
    content = {"application/json": {"schema": _reference("Error")}}
    return {
        status: {"description": _ERROR_STATUSES[status], "content": content} for status in statuses
    }

"""Tools, in calls of the API and in their answers."""

from __future__ import annotations

import json
from collections.abc import Iterable

from baton.core.errors import InvalidRequest, NotServed
from baton.core.types import ChatPrompt, Tool, ToolCall
from baton.router.answers.answer_events import ToolCallDelta
from baton.router.answers.tools import MAX_TOOLS, with_tools
from baton.router.edges.http.fields import Json, as_text, wrong_type
from baton.router.edges.http.schemas import list_of, object_of

MAX_TEXT = 1_000_000
"""Characters of a description, or of arguments."""


def read_tools(body: Json, chat: ChatPrompt) -> ChatPrompt:
    """The chat with the tools that the model may call. Without leave to, it is told of none."""
    tools = body.get("tools")
    if not isinstance(tools, list | None):
        raise wrong_type("tools", "a list", tools)
    offered = [_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    choice = body.get("tool_choice", "auto" if tools else "none")
    choice = "none" if choice is None else choice
    name = "" if choice in ("none", "auto", "required") else _read_named(choice)
    if choice == "none" or (choice == "auto" and not offered):
        return chat
    return with_tools(
        chat, offered, must_call=choice != "auto", tool_name=name, field="tool_choice"
    )


def _read_named(choice: object) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict):
        raise wrong_type("tool_choice", "none, auto, required or a function", choice)
    return as_text(function.get("name"), "tool_choice.function.name", MAX_TEXT)


def _read_tool(tool: object, name: str) -> Tool:
    if not isinstance(tool, dict):
        raise wrong_type(name, "an object", tool)
    if tool.get("type") != "function":
        raise NotServed(f"{name} is no function, and nothing else is served", field="tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise wrong_type(f"{name}.function", "an object", function)
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise wrong_type(f"{name}.function.parameters", "an object", parameters)
    about = function.get("description")
    return Tool(
        as_text(function.get("name"), f"{name}.function.name", MAX_TEXT),
        as_text("" if about is None else about, f"{name}.function.description", MAX_TEXT),
        json.dumps(parameters) if parameters else "",
    )


def read_calls(calls: object, name: str) -> tuple[ToolCall, ...]:
    """What an assistant's message has called."""
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise wrong_type(name, "a list", calls)
    return tuple(_read_call(call, f"{name}[{index}]") for index, call in enumerate(calls))


def _read_call(call: object, name: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidRequest(f"{name} must be a call of a function", field=name)
    return ToolCall(
        as_text(call.get("id"), f"{name}.id", MAX_TEXT),
        as_text(function.get("name"), f"{name}.function.name", MAX_TEXT),
        as_text(function.get("arguments"), f"{name}.function.arguments", MAX_TEXT),
    )


def whole_calls(pieces: Iterable[ToolCallDelta]) -> list[Json]:
    calls: list[Json] = []
    arguments: list[str] = []
    for piece in pieces:
        if piece.name:
            calls.append({"id": piece.id, "type": "function", "function": {"name": piece.name}})
            arguments.append("")
        arguments[-1] += piece.arguments
    return [
        {**call, "function": {**_function(call), "arguments": text}}
        for call, text in zip(calls, arguments, strict=True)
    ]


def _function(call: Json) -> Json:
    function = call["function"]
    assert isinstance(function, dict)
    return function


def call_deltas(pieces: Iterable[ToolCallDelta]) -> list[Json]:
    return [_call_delta(piece) for piece in pieces]


def _call_delta(piece: ToolCallDelta) -> Json:
    if not piece.name:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    return {
        "index": piece.index,
        "id": piece.id,
        "type": "function",
        "function": {"name": piece.name, "arguments": piece.arguments},
    }


_TEXT: Json = {"type": "string"}
_FUNCTION = object_of({"name": _TEXT, "arguments": _TEXT}, required=["name", "arguments"])

CALLS_SCHEMA: Json = list_of(
    object_of(
        {"id": _TEXT, "type": {"const": "function"}, "function": _FUNCTION},
        required=["id", "function"],
    )
)
CALL_DELTAS_SCHEMA: Json = list_of(
    object_of(
        {
            "index": {"type": "integer"},
            "id": _TEXT,
            "type": {"const": "function"},
            "function": object_of({"name": _TEXT, "arguments": _TEXT}),
        },
        required=["index", "function"],
    )
)
TOOLS_SCHEMA: Json = {
    "type": ["array", "null"],
    "maxItems": MAX_TOOLS,
    "items": object_of(
        {
            "type": {"const": "function"},
            "function": object_of(
                {
                    "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                    "description": {"type": ["string", "null"]},
                    "parameters": {"type": ["object", "null"]},
                },
                required=["name"],
            ),
        },
        required=["type", "function"],
    ),
    "description": "Functions that the model may ask the caller to call.",
}
CHOICE_SCHEMA: Json = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        object_of(
            {"function": object_of({"name": _TEXT}, required=["name"])}, required=["function"]
        ),
    ],
    "description": "Whether a tool is called: as the model likes (auto), never, or exactly one.",
}

"""/v1/chat/completions: messages in, choices out."""

from __future__ import annotations

from baton.core.bounds import MAX_MESSAGES, MAX_TOP_LOGPROBS
from baton.core.errors import InvalidRequest, NotServed
from baton.core.types import ChatPrompt, Message
from baton.router.edges.http.answers import Piece
from baton.router.edges.http.fields import (
    Field,
    Flag,
    Integer,
    Json,
    String,
    Unserved,
    as_text,
    wrong_type,
)
from baton.router.edges.http.generation import Asked, read_asked
from baton.router.edges.http.logprobs import chat_logprobs
from baton.router.edges.http.schemas import described, object_of, or_null
from baton.router.edges.http.tools import (
    CALLS_SCHEMA,
    call_deltas,
    read_calls,
    read_tools,
    whole_calls,
)

# What templates call those who speak. OpenAI's newer models call the system the developer.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
MAX_CONTENT = 8_000_000
"""Characters. What the model can hold is told later, and more exactly."""

LOGPROBS = Flag("logprobs", "Tell how likely each token of the answer was.")
TOP_LOGPROBS = Integer(
    "top_logprobs",
    "How many of the likeliest tokens to tell with each; needs logprobs.",
    0,
    MAX_TOP_LOGPROBS,
)
READ: tuple[Field, ...] = (LOGPROBS, TOP_LOGPROBS)

# Of messages.
_TOOL_CALL_ID = String("tool_call_id", "The call that a tool's message answers.", 1024)
_NAME = String("name", "A tool's name; ignored elsewhere.", 1024)
_REASONING = String("reasoning_content", "What the assistant thought.", MAX_CONTENT)

_FUNCTIONS = "functions, which are called tools now"
_TEMPLATES = "changes of the chat template"

UNSERVED = (
    Unserved("prompt_logprobs", "log probabilities of a chat's prompt"),
    Unserved("functions", _FUNCTIONS, ([],)),
    Unserved("function_call", _FUNCTIONS, ("none",)),
    Unserved("modalities", "answers that are not text", (["text"],)),
    Unserved("audio", "answers that are not text"),
    Unserved("web_search_options", "searches"),
    Unserved("reasoning_effort", "a choice of how long to think", ("none",)),
    Unserved("verbosity", "a choice of how much to say", ("medium",)),
    Unserved("chat_template", _TEMPLATES),
    Unserved("chat_template_kwargs", _TEMPLATES, ({},)),
    Unserved("add_generation_prompt", _TEMPLATES, (True,)),
    Unserved("continue_final_message", _TEMPLATES, (False,)),
    Unserved("documents", _TEMPLATES, ([],)),
)


class ChatApi:
    prompt_field = "messages"
    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def read(self, body: Json, request_id: str) -> Asked:
        for field in UNSERVED:
            field.check(body)
        prompt = read_tools(body, read_messages(body.get("messages")))
        return read_asked(body, request_id, [prompt], logprobs=_read_logprobs(body))

    def choice(self, piece: Piece) -> Json:
        message: Json = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.tool_calls:
            message["content"] = piece.text or None
            message["tool_calls"] = whole_calls(piece.tool_calls)
        return self._choice("message", message, piece)

    def delta(self, piece: Piece) -> Json:
        delta: Json = {}
        if piece.first:
            silent = piece.reasoning or piece.tool_calls
            delta = {"role": "assistant", "content": None if silent else ""}
        if piece.text:
            delta["content"] = piece.text
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.tool_calls:
            delta["tool_calls"] = call_deltas(piece.tool_calls)
        return self._choice("delta", delta, piece)

    def _choice(self, name: str, content: Json, piece: Piece) -> Json:
        return {
            "index": piece.index,
            name: content,
            "logprobs": chat_logprobs(piece.scores),
            "finish_reason": piece.finish,
        }


def _read_logprobs(body: Json) -> int | None:
    """How many of the likeliest tokens to tell; None where no probabilities are wanted."""
    most = TOP_LOGPROBS.of(body)
    if LOGPROBS.of(body):
        return most or 0
    if most:
        raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
    return None


def read_messages(messages: object) -> ChatPrompt:
    if not isinstance(messages, list):
        raise wrong_type("messages", "a list of messages", messages)
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages must have 1 to {MAX_MESSAGES} entries", field="messages")
    return ChatPrompt(
        tuple(_read_message(item, f"messages[{index}]") for index, item in enumerate(messages))
    )


def _read_message(message: object, name: str) -> Message:
    if not isinstance(message, dict):
        raise wrong_type(name, "an object", message)
    role = message.get("role")
    if role == "function" or message.get("function_call"):
        raise NotServed(f"{name} is about functions, which are called tools now", field=name)
    if not isinstance(role, str) or role not in ROLES:
        raise wrong_type(f"{name}.role", f"one of {', '.join(ROLES)}", role)
    calls = read_calls(message.get("tool_calls"), f"{name}.tool_calls")
    content = message.get("content")
    if calls and content is None:
        content = ""
    call_id = _TOOL_CALL_ID.of(message)
    if role == "tool" and not call_id:
        field = f"{name}.tool_call_id"
        raise InvalidRequest(f"{field} is missing: which call is answered?", field=field)
    speaker = _NAME.of(message)
    return Message(
        ROLES[role],
        _read_content(content, f"{name}.content"),
        calls,
        call_id if role == "tool" else "",
        speaker if role == "tool" else "",
        _REASONING.of(message),
    )


def _read_content(content: object, name: str) -> str:
    """Several parts are lines of one text."""
    if not isinstance(content, list):
        return as_text(content, name, MAX_CONTENT)
    parts = (_read_part(part, f"{name}[{index}]") for index, part in enumerate(content))
    return as_text("\n".join(parts), name, MAX_CONTENT)


def _read_part(part: object, name: str) -> str:
    if not isinstance(part, dict):
        raise wrong_type(name, "an object", part)
    if part.get("type") != "text":
        raise NotServed(f"{name} is not text, and nothing else is served", field=f"{name}.type")
    return as_text(part.get("text"), f"{name}.text", MAX_CONTENT)


_PART_SCHEMA: Json = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}

_CONTENT_SCHEMA: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]}
_CALL_ID_SCHEMA: Json = {**_TOOL_CALL_ID.schema, "type": "string", "minLength": 1}


def _message_schema(roles: list[str], required: list[str], properties: Json) -> Json:
    common: Json = {
        "role": {"enum": roles},
        "content": _CONTENT_SCHEMA,
        "tool_calls": or_null(CALLS_SCHEMA),
        **described((_TOOL_CALL_ID, _NAME, _REASONING)),
    }
    return object_of({**common, **properties}, required=["role", *required])


MESSAGES_SCHEMA: Json = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "anyOf": [
            _message_schema([role for role in ROLES if role != "tool"], ["content"], {}),
            _message_schema(
                ["assistant"],
                ["tool_calls"],
                {
                    "content": or_null(_CONTENT_SCHEMA),
                    "tool_calls": {**CALLS_SCHEMA, "minItems": 1},
                },
            ),
            _message_schema(
                ["tool"], ["content", "tool_call_id"], {"tool_call_id": _CALL_ID_SCHEMA}
            ),
        ]
    },
}

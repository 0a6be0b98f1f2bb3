"""/v1/chat/completions: messages in, choices out."""

from __future__ import annotations

from core.errors import InvalidRequest, NotServed
from core.types import MAX_TOP_LOGPROBS, ChatPrompt, Message
from router.http.answers import Piece
from router.http.fields import Field, Flag, Integer, Json, Unserved, as_text, wrong_type
from router.http.generation import Asked, read_asked
from router.http.logprobs import chat_logprobs
from router.parse import MAX_MESSAGES

# What templates call those who speak. OpenAI's newer models call the system the developer.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
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

_TOOLS = "tools"
_TEMPLATES = "changes of the chat template"

UNSERVED = (
    Unserved("tool_choice", _TOOLS, ("none",)),
    Unserved("functions", _TOOLS, ([],)),
    Unserved("function_call", _TOOLS, ("none",)),
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
        _check_tools(body)
        prompt = read_messages(body.get("messages"))
        return read_asked(body, request_id, [prompt], logprobs=_read_logprobs(body))

    def choice(self, piece: Piece) -> Json:
        return {
            "index": piece.index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": chat_logprobs(piece.scores),
            "finish_reason": piece.finish,
        }

    def delta(self, piece: Piece) -> Json:
        delta: Json = {"role": "assistant", "content": piece.text} if piece.first else {}
        if piece.text:
            delta["content"] = piece.text
        return {
            "index": piece.index,
            "delta": delta,
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


def _check_tools(body: Json) -> None:
    """Tools that must not be used are as if they were not there."""
    tools = body.get("tools")
    if not isinstance(tools, list | None):
        raise wrong_type("tools", "a list", tools)
    if tools and body.get("tool_choice") != "none":
        raise NotServed("tools are not served", field="tools")


def _read_message(message: object, name: str) -> Message:
    if not isinstance(message, dict):
        raise wrong_type(name, "an object", message)
    role = message.get("role")
    if role in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
        raise NotServed(f"{name} is about tools, which are not served", field=name)
    if not isinstance(role, str) or role not in ROLES:
        raise wrong_type(f"{name}.role", f"one of {', '.join(ROLES)}", role)
    return Message(ROLES[role], _read_content(message.get("content"), f"{name}.content"))


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

TOOLS_SCHEMA: Json = {
    "type": ["array", "null"],
    "description": "Not served, unless tool_choice is none.",
}

MESSAGES_SCHEMA: Json = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]},
        },
    },
}

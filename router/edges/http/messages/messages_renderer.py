"""Renders answers as messages, whole or as the events of their stream:

message_start, for each block content_block_start, content_block_delta … and content_block_stop (a
ping after the first start), then message_delta and message_stop.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from baton.router.edges.http.answer_renderer import encode
from baton.router.edges.http.answer_types import ResponseCacheUsage
from baton.router.edges.http.block_renderer import Block, BlockKind, BlockRenderer, server_event
from baton.router.edges.http.messages.messages_request import MessagesRequest
from baton.v1 import inference_pb2 as pb

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

_STOP_REASONS: dict[int, StopReason] = {
    pb.FINISH_REASON_STOP: "end_turn",
    pb.FINISH_REASON_LENGTH: "max_tokens",
    pb.FINISH_REASON_TOOL_CALLS: "tool_use",
}
# Block kind: (type of its deltas, key of their text).
_DELTAS: dict[BlockKind, tuple[str, str]] = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageBlock(TypedDict):
    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, object]]


class MessageUsage(TypedDict):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    response_cache: NotRequired[ResponseCacheUsage]


class MessageAnswer(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(TypedDict):
    """Any event; its type says which fields it has."""

    type: str
    message: NotRequired[MessageAnswer]
    index: NotRequired[int]
    content_block: NotRequired[MessageBlock]
    delta: NotRequired[dict[str, object]]
    usage: NotRequired[MessageUsage]


class CountTokensAnswer(TypedDict):
    input_tokens: int


class MessagesRenderer(BlockRenderer[MessagesRequest]):
    body_model = MessagesRequest
    prompt_field = "messages"
    id_prefix = "msg_"

    def whole(self) -> bytes:
        return encode(self._message())

    def _message(self) -> MessageAnswer:
        """The message so far: when a stream begins, without content and stop reason."""
        finished = self._finished
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [_block(each, each.text) for each in self._blocks] if finished else [],
            **self._stop(),
            "usage": self._usage(),
        }

    def _begin(self) -> Iterator[bytes]:
        yield server_event("message_start", {"message": self._message()})

    def _open(self, block: Block) -> Iterator[bytes]:
        content = {"index": block.index, "content_block": _block(block, "")}
        yield server_event("content_block_start", content)
        if block.index == 0:
            yield server_event("ping", {})

    def _add(self, block: Block, text: str) -> bytes:
        kind, key = _DELTAS[block.kind]
        delta = {"type": kind, key: text}
        return server_event("content_block_delta", {"index": block.index, "delta": delta})

    def _close(self, block: Block) -> Iterator[bytes]:
        yield server_event("content_block_stop", {"index": block.index})

    def _end(self) -> Iterator[bytes]:
        yield server_event("message_delta", {"delta": self._stop(), "usage": self._usage()})
        yield server_event("message_stop", {})

    def _stop(self) -> _Stop:
        finished = self._finished
        if finished is None:
            return {"stop_reason": None, "stop_sequence": None}
        if finished.stop:
            return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop}
        return {"stop_reason": _STOP_REASONS[finished.finish_reason], "stop_sequence": None}

    def _usage(self) -> MessageUsage:
        """Cached tokens are known only at the end."""
        usage: MessageUsage = {
            "input_tokens": self.prompt_tokens - self.cached_tokens,
            "output_tokens": self.completion_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached_tokens,
        }
        if cache := self.response_cache:
            usage["response_cache"] = cache
        return usage


class _Stop(TypedDict):
    stop_reason: StopReason | None
    stop_sequence: str | None


def _block(block: Block, text: str) -> MessageBlock:
    if block.kind == "text":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    call = block.call
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": _arguments(text)}


def _arguments(text: str) -> dict[str, object]:
    """Parses a call's arguments. Empty if max_tokens cut them off."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}

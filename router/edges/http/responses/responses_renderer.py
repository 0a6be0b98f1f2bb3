"""Renders answers as responses, whole or as the events of their stream:

response.created, response.in_progress, for each block response.output_item.added, its parts and
deltas, and response.output_item.done, then response.completed, .incomplete or .failed.
"""

from __future__ import annotations

import json
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NotRequired

from pydantic import BaseModel
from typing_extensions import TypedDict

from baton.core.proto_json import Json
from baton.core.types import Request
from baton.router.edges.client_buffer import ClientBuffer
from baton.router.edges.http.answer_renderer import encode
from baton.router.edges.http.answer_types import ResponseCacheUsage
from baton.router.edges.http.block_renderer import Block, BlockKind, BlockRenderer, server_event
from baton.router.edges.http.responses.input_items import named_items
from baton.router.edges.http.responses.responses_request import (
    AssistantItem,
    CallItem,
    InputItem,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
)
from baton.v1 import inference_pb2 as pb

ResponseStatus = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]

# By block kind: the prefix of item ids, and that of delta event names.
_ITEM_IDS: dict[BlockKind, str] = {"reasoning": "rs", "text": "msg", "call": "fc"}
_DELTAS: dict[BlockKind, str] = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


Items = Mapping[str, InputItem]
"""Of a conversation, by id and in order."""

OnEnd = Callable[[bytes, Items, Items], None]
"""Called at the end with the response, the conversation before it, and its items."""


class OutputPart(TypedDict):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[object]]
    logprobs: NotRequired[list[object]]


class OutputItem(TypedDict):
    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: ResponseStatus
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[OutputPart]]
    summary: NotRequired[list[OutputPart]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]
    arguments: NotRequired[str]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int
    response_cache: NotRequired[ResponseCacheUsage]


class ResponseErrorObject(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseAnswer(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: ResponseStatus
    background: Literal[False]
    error: ResponseErrorObject | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, object]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, object]
    store: bool
    temperature: float
    text: dict[str, object]
    tool_choice: object
    tools: list[dict[str, object]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class ResponseEvent(TypedDict):
    """Any event; its type says which fields it has."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseAnswer]
    output_index: NotRequired[int]
    item: NotRequired[OutputItem]
    item_id: NotRequired[str]
    content_index: NotRequired[int]
    part: NotRequired[OutputPart]
    delta: NotRequired[str]
    text: NotRequired[str]
    arguments: NotRequired[str]
    name: NotRequired[str]
    logprobs: NotRequired[list[object]]


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponsesRenderer(BlockRenderer[ResponsesRequest]):
    body_model = ResponsesRequest
    prompt_field = "input"
    id_prefix = "req_"

    def __init__(
        self, body: ResponsesRequest, requests: Sequence[Request], history: Items | None = None
    ) -> None:
        """`history`: the conversation that the response continues."""
        super().__init__(body, requests)
        # A stored response needs a unique id; the request's may come from the caller.
        self._number = uuid.uuid4().hex
        self.id = f"resp_{self._number}"
        self._sampling = requests[0].sampling
        self.inputs = {**(history or {}), **named_items(body.input, self._number)}
        self._events = 0
        self._error: ResponseErrorObject | None = None
        self._cancelled = False
        self.on_end: OnEnd | None = None
        self._buffer: weakref.ref[ClientBuffer] | None = None

    def began(self, events: ClientBuffer) -> None:
        self._buffer = weakref.ref(events)

    def current(self) -> bytes:
        """The response so far."""
        return encode(self._response())

    def cancel(self) -> bytes:
        """Ends the response, and returns it so far."""
        self._cancelled = True
        if self._buffer and (buffer := self._buffer()):
            buffer.close()
        return self.current()

    def whole(self) -> bytes:
        body = self.current()
        if self.on_end:
            items = {self._item_id(each): _as_input(each) for each in self._blocks}
            self.on_end(body, self.inputs, items)
        return body

    def failure(self, body: bytes) -> bytes:
        error = json.loads(body)["error"]
        known = error["code"] == "rate_limit_exceeded"
        code = error["code"] if known else "server_error"
        self._error = {"code": code, "message": error["message"]}
        return self._final_event("response.failed")

    def _begin(self) -> Iterator[bytes]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response={**self._response(), "output": []})

    def _open(self, block: Block) -> Iterator[bytes]:
        item = self._item(block, "in_progress", [])
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            yield self._item_event(block, "response.content_part.added", part=_part(block, ""))

    def _add(self, block: Block, text: str) -> bytes:
        return self._item_event(block, _DELTAS[block.kind] + ".delta", delta=text, **_extras(block))

    def _close(self, block: Block) -> Iterator[bytes]:
        key = "arguments" if block.kind == "call" else "text"
        done = {key: block.text, **_extras(block)}
        yield self._item_event(block, _DELTAS[block.kind] + ".done", **done)
        if block.kind != "call":
            yield self._item_event(
                block, "response.content_part.done", part=_part(block, block.text)
            )
        item = self._item(block, self._item_status(block), [block])
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _end(self) -> Iterator[bytes]:
        completed = self._status == "completed"
        yield self._final_event("response.completed" if completed else "response.incomplete")

    def _final_event(self, name: str) -> bytes:
        self.whole()
        return self._event(name, response=self._response())

    def _event(self, name: str, **content: object) -> bytes:
        self._events += 1
        return server_event(name, {"sequence_number": self._events - 1, **content})

    def _item_event(self, block: Block, name: str, **content: object) -> bytes:
        """An event of a block's item."""
        place: dict[str, object] = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        return self._event(name, **place, **content)

    def _response(self) -> ResponseAnswer:
        body, status, choice = self._body, self._status, self._body.tool_choice or "auto"
        text = body.text.format or TextFormat(type="text", schema=None)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": self._error,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "instructions": body.instructions or None,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self.model,
            "output": [
                self._item(block, self._item_status(block), [block]) for block in self._blocks
            ],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id or None,
            "reasoning": _echo(body.reasoning),
            "store": body.store,
            "temperature": self._sampling.temperature,
            "text": {"format": _echo(text)},
            "tool_choice": choice if isinstance(choice, str) else _echo(choice),
            "tools": [_echo(tool) for tool in body.tools],
            "top_p": self._sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage() if self._finished else None,
        }

    @property
    def _status(self) -> ResponseStatus:
        if self._error:
            return "failed"
        if self._cancelled:
            return "cancelled"
        if self._finished is None:
            return "in_progress"
        cut = self._finished.finish_reason == pb.FINISH_REASON_LENGTH
        return "incomplete" if cut else "completed"

    def _item_status(self, block: Block) -> ResponseStatus:
        """The last item of a response that ended early is incomplete."""
        last = block is self._blocks[-1]
        return "incomplete" if last and self._status != "completed" else "completed"

    def _item_id(self, block: Block) -> str:
        return f"{_ITEM_IDS[block.kind]}_{self._number}_{block.index}"

    def _item(self, block: Block, status: ResponseStatus, parts: list[Block]) -> OutputItem:
        """Renders a block's item. `parts` is empty when the item begins."""
        identity = self._item_id(block)
        if block.kind == "call":
            call: OutputItem = {
                "id": identity,
                "type": "function_call",
                "status": status,
                "call_id": block.call.id,
                "name": block.call.name,
                "arguments": block.text if parts else "",
            }
            namespace = self._body.namespaces.get(block.call.name)
            return {**call, "namespace": namespace} if namespace else call
        content = [_part(each, each.text) for each in parts]
        if block.kind == "reasoning":
            return {
                "id": identity,
                "type": "reasoning",
                "status": status,
                "summary": [],
                "content": content,
            }
        return {
            "id": identity,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _usage(self) -> ResponseUsage:
        usage: ResponseUsage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if cache := self.response_cache:
            usage["response_cache"] = cache
        return usage


def _echo(field: BaseModel) -> Json:
    return field.model_dump(mode="json", by_alias=True, exclude_none=True)


def _part(block: Block, text: str) -> OutputPart:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _as_input(block: Block) -> AssistantItem:
    """Not validated, since an answer may be longer than a field of a request."""
    if block.kind == "call":
        call = block.call
        return CallItem.model_construct(
            type="function_call", call_id=call.id, name=call.name, arguments=block.text
        )
    if block.kind == "reasoning":
        part = {"type": "reasoning_text", "text": block.text}
        return ReasoningItem.model_construct(type="reasoning", content=[part])
    return MessageItem.model_construct(role="assistant", content=block.text)


def _extras(block: Block) -> dict[str, object]:
    return {"logprobs": []} if block.kind == "text" else {}

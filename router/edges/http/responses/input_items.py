"""The items that a response was made from, as /v1/responses/{id}/input_items lists them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from baton.router.edges.http.responses.responses_request import (
    CallItem,
    CallOutputItem,
    InputItem,
    ItemReference,
    MessageItem,
    ReasoningItem,
)

MAX_ITEMS_LISTED = 100
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}


class ListedPart(TypedDict):
    type: Literal["input_text", "output_text", "refusal", "reasoning_text", "summary_text"]
    text: NotRequired[str]
    refusal: NotRequired[str]
    annotations: NotRequired[list[object]]
    logprobs: NotRequired[list[object]]


class ListedItem(TypedDict):
    id: str
    type: Literal["message", "function_call", "function_call_output", "reasoning"]
    status: Literal["completed"]
    role: NotRequired[Literal["system", "developer", "user", "assistant"]]
    content: NotRequired[list[ListedPart]]
    summary: NotRequired[list[ListedPart]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    output: NotRequired[str | list[ListedPart]]


class InputItemList(TypedDict):
    object: Literal["list"]
    data: list[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokensAnswer(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


def named_items(items: Iterable[InputItem], number: str) -> dict[str, InputItem]:
    """The input of the response of this number, by ids of ours."""
    return {
        f"{_PREFIXES.get(item.type, 'rs')}_{number}_in{place}": item
        for place, item in enumerate(items)
    }


def listed_item(name: str, item: InputItem) -> ListedItem:
    assert not isinstance(item, ItemReference)  # ResponsesRequest.resolved()
    listed: ListedItem = {"id": name, "type": item.type, "status": "completed"}
    match item:
        case MessageItem():
            kind: Literal["input_text", "output_text"] = "input_text"
            if item.role == "assistant":
                kind = "output_text"
            listed |= {"role": item.role, "content": _parts(item.content, kind)}
        case CallItem():
            listed |= {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        case CallOutputItem():
            output = item.output
            whole = output if isinstance(output, str) else _parts(output, "input_text")
            listed |= {"call_id": item.call_id, "output": whole}
        case ReasoningItem():
            listed["summary"] = _parts(item.summary or [], "summary_text")
            if item.content:
                listed["content"] = _parts(item.content, "reasoning_text")
    return listed


def _parts(
    content: str | Iterable[Mapping[str, object]],
    kind: Literal["input_text", "output_text", "reasoning_text", "summary_text"],
) -> list[ListedPart]:
    if isinstance(content, str):
        content = [{"text": content}]
    return [_part(part, kind) for part in content]


def _part(
    part: Mapping[str, object],
    kind: Literal["input_text", "output_text", "reasoning_text", "summary_text"],
) -> ListedPart:
    if "refusal" in part:
        return {"type": "refusal", "refusal": str(part["refusal"])}
    listed: ListedPart = {"type": kind, "text": str(part["text"])}
    return listed | {"annotations": [], "logprobs": []} if kind == "output_text" else listed

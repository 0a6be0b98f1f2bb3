"""The body of /v1/responses, turned into a chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from baton.core import bounds
from baton.core.errors import InvalidRequest
from baton.core.generation_defaults import GenerationDefaults
from baton.core.types import ChatPrompt, Message, Request, Structure, Tool, ToolCall
from baton.router.edges.http.chat_request import (
    TEMPLATE_ROLES,
    ChatRequest,
    Effort,
    RefusalPart,
    ToolText,
    chat_fields,
    choose_tools,
    joined,
    known_choice,
    template_kwargs,
)
from baton.router.edges.http.generation_request import (
    MAX_PROMPT_CHARACTERS,
    GenerationRequest,
    PromptText,
    ShortText,
    TextOrParts,
    TokenCount,
)
from baton.router.edges.http.request_model import (
    RequestModel,
    StrictModel,
    Unserved,
    about,
    invalid,
    shown,
    tag_by_type,
)
from baton.router.prompts.output_grammar import json_structure


@with_config(ConfigDict(strict=True))
class ItemPart(TypedDict):
    """A part of a message, a tool's output or the reasoning."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: PromptText


SaidPart = Annotated[
    Annotated[ItemPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(tag_by_type("text", "refusal")),
]
ItemParts = Annotated[list[ItemPart], Field(fail_fast=True)]
ItemContent = TextOrParts[ItemPart]


class MessageItem(StrictModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: TextOrParts[SaidPart]


class CallItem(StrictModel):
    type: Literal["function_call"]
    call_id: ToolText
    name: ToolText
    arguments: ToolText


class CallOutputItem(StrictModel):
    type: Literal["function_call_output"]
    call_id: ToolText
    output: ItemContent


class ReasoningItem(StrictModel):
    type: Literal["reasoning"]
    content: ItemParts | None = None
    summary: ItemParts | None = None


class ItemReference(StrictModel):
    """Stands for an item of a stored response."""

    type: Literal["item_reference"]
    id: ShortText


AssistantItem = MessageItem | CallItem | ReasoningItem
_ITEM_TYPES = "message", "function_call", "function_call_output", "reasoning", "item_reference"
InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(tag_by_type(*_ITEM_TYPES)),
]


@dataclass(slots=True)
class _Turn:
    """Consecutive items of the assistant, which become one message of a chat."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def messages(self) -> list[Message]:
        """One message, or none if the turn has no items."""
        if not (self.texts or self.thoughts or self.calls):
            return []
        text, reasoning = "\n".join(self.texts), "\n".join(self.thoughts)
        return [Message("assistant", text, tuple(self.calls), reasoning=reasoning)]


def _messages(items: Iterable[InputItem]) -> Iterator[Message]:
    turn, names = _Turn(), dict[str, str]()  # the names of called tools by call
    for item in items:
        match item:
            case ReasoningItem():
                turn.thoughts.append(joined(item.content or item.summary))
            case CallItem():
                names[item.call_id] = item.name
                turn.calls.append(ToolCall(item.call_id, item.name, item.arguments))
            case MessageItem() if item.role == "assistant" and not turn.calls:
                turn.texts.append(joined(item.content))
            case _:
                assert not isinstance(item, ItemReference)  # ResponsesRequest.resolved()
                yield from turn.messages()
                turn = _Turn()
                yield _message(item, names)
    yield from turn.messages()


def text_size(item: InputItem) -> int:
    """Characters."""
    match item:
        case MessageItem():
            return len(joined(item.content))
        case CallItem():
            return len(item.arguments)
        case CallOutputItem():
            return len(joined(item.output))
        case ReasoningItem():
            return len(joined(item.content or item.summary))
    return 0


def _message(item: MessageItem | CallOutputItem, names: dict[str, str]) -> Message:
    if isinstance(item, MessageItem):
        return Message(TEMPLATE_ROLES.get(item.role, item.role), joined(item.content))
    call = item.call_id
    return Message("tool", joined(item.output), tool_call_id=call, name=names.get(call, ""))


class ResponsesFunction(StrictModel):
    type: Literal["function"]
    name: ToolText
    description: ToolText | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        parameters = json.dumps(self.parameters) if self.parameters else ""
        return Tool(self.name, self.description or "", parameters)


class NamespaceTool(StrictModel):
    """A group of functions, as Codex sends them. Their calls name the namespace too."""

    type: Literal["namespace"]
    name: ToolText
    description: ToolText | None = None
    tools: Annotated[list[ResponsesFunction], Field(fail_fast=True, max_length=bounds.MAX_TOOLS)]


_Hosted = Literal["web_search", "web_search_preview"]


class HostedTool(StrictModel):
    """A tool that some servers run. Accepted because agents send it with every request, but not run
    here and not shown to the model."""

    type: _Hosted


def _tool_tag(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind in get_args(_Hosted):
        return "<hosted>"
    return "<namespace>" if kind == "namespace" else "<function>"


ResponsesTool = Annotated[
    Annotated[ResponsesFunction, Tag("<function>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    Discriminator(_tool_tag),
]


class NamedTool(StrictModel):
    type: Literal["function"]
    name: ToolText


class AllowedNames(StrictModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1)]


_choice_tag = tag_by_type("mode", "function", "allowed_tools")
ResponsesToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedTool, Tag("<function>")]
    | Annotated[AllowedNames, Tag("<allowed_tools>")],
    Discriminator(_choice_tag),
    known_choice(_choice_tag),
]


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    json_schema: dict[str, object] | None = Field(None, alias="schema")

    @property
    def structure(self) -> Structure | None:
        schema = self.json_schema if self.type == "json_schema" else None
        return None if self.type == "text" else json_structure(schema, "text.format")


class TextConfig(RequestModel):
    format: TextFormat | None = None

    unserved: ClassVar[dict[str, Unserved]] = {
        "verbosity": Unserved("control of verbosity", ("medium",))
    }


class ReasoningConfig(RequestModel):
    effort: Effort | None = None


def _as_items(value: object) -> object:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise invalid(f"must be a string or a list of items, not {shown(value)}")
    return value


_Items = Annotated[
    list[InputItem], Field(fail_fast=True, min_length=1, max_length=bounds.MAX_MESSAGES)
]


_LENGTH = Unserved("a field of chats; send max_output_tokens")


class ResponsesRequest(GenerationRequest):
    input: Annotated[_Items, BeforeValidator(_as_items, json_schema_input_type=PromptText | _Items)]
    instructions: PromptText = about("A system message before all others; never stored.", "")
    max_output_tokens: TokenCount | None = about("Maximum tokens of the answer.")
    previous_response_id: ShortText = about("The stored response that this one follows.", "")
    store: bool = about("Keep the response for a while.", True)
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True, max_length=bounds.MAX_TOOLS)] = (
        about("Functions that the model may ask the caller to call.", ())
    )
    tool_choice: ResponsesToolChoice | None = about("Whether a tool is called. Absent: auto.")
    parallel_tool_calls: bool = about("Ignored.", True)
    text: TextConfig = about("A format that the answer follows.", TextConfig())
    reasoning: ReasoningConfig = about(
        "How long to think, if the chat template supports it.", ReasoningConfig()
    )
    metadata: dict[str, object] = about("Returned unchanged.", {})

    unserved: ClassVar[dict[str, Unserved]] = {
        **ChatRequest.unserved,
        **chat_fields("response", "text.format"),
        "stop": Unserved("stop strings", ([],)),
        "max_tokens": _LENGTH,
        "max_completion_tokens": _LENGTH,
        "reasoning_effort": Unserved("a field of chats; send reasoning.effort"),
        "background": Unserved("background responses", (False,)),
        "conversation": Unserved("conversations; send previous_response_id"),
        "prompt": Unserved("stored prompts"),
        "truncation": Unserved("truncation of conversations", ("disabled",)),
    }

    def requests(self, request_id: str, defaults: GenerationDefaults) -> tuple[Request, ...]:
        request = self._request(
            request_id,
            defaults,
            self.chat_prompt(),
            max_tokens=self.max_output_tokens,
            stop=(),
            structure=self.text.format.structure if self.text.format else None,
        )
        return (request,)

    def chat_prompt(self, history: Iterable[InputItem] = ()) -> ChatPrompt:
        """`history` is the conversation up to and including the stored response."""
        rules = [Message("system", self.instructions)] if self.instructions else []
        chat = ChatPrompt(
            (*rules, *_messages((*history, *self.input))),
            template_kwargs=template_kwargs(self.reasoning.effort, {}),
        )
        choice, allowed = self.tool_choice or "auto", list[str]()
        if isinstance(choice, NamedTool):
            mode, allowed = "required", [choice.name]
        elif isinstance(choice, AllowedNames):
            mode, allowed = choice.mode, [tool.name for tool in choice.tools]
        else:
            mode = choice
        return choose_tools(chat, [each.tool() for each, _ in self._functions()], mode, allowed)

    def resolved(self, find: Callable[[str], InputItem]) -> Self:
        """Replaces references by the items that they stand for."""
        names = [item.id for item in self.input if isinstance(item, ItemReference)]
        if not names:
            return self
        if len(set(names)) < len(names):
            raise InvalidRequest("input must not refer to an item twice", field="input")
        items = [find(item.id) if isinstance(item, ItemReference) else item for item in self.input]
        if sum(map(text_size, items)) > MAX_PROMPT_CHARACTERS:
            raise InvalidRequest(
                f"input must have at most {MAX_PROMPT_CHARACTERS} characters", field="input"
            )
        return self.model_copy(update={"input": items})

    @property
    def namespaces(self) -> dict[str, str]:
        """Namespaces by function name."""
        return {each.name: namespace for each, namespace in self._functions() if namespace}

    def _functions(self) -> Iterator[tuple[ResponsesFunction, str]]:
        """Each function with its namespace, or an empty string."""
        for tool in self.tools:
            if isinstance(tool, NamespaceTool):
                yield from ((each, tool.name) for each in tool.tools)
            elif isinstance(tool, ResponsesFunction):
                yield tool, ""

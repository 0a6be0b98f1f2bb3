"""The bodies of /v1/messages and /v1/messages/count_tokens, as chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, NotRequired

from pydantic import ConfigDict, Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from baton.core import bounds
from baton.core.generation_defaults import GenerationDefaults
from baton.core.types import ChatPrompt, Message, Request, Tool, ToolCall
from baton.router.edges.http.chat_request import (
    Content,
    Effort,
    TextPart,
    ToolText,
    chat_fields,
    choose_tools,
    joined,
    template_kwargs,
)
from baton.router.edges.http.generation_request import (
    GenerationRequest,
    PromptText,
    ShortText,
    StopList,
    TextOrParts,
    TokenCount,
)
from baton.router.edges.http.request_model import (
    RequestModel,
    StrictModel,
    Unserved,
    about,
    seconds_of,
    tag_by_type,
)
from baton.router.prompts.output_grammar import json_structure

BILLING = "x-anthropic-billing-header:"
"""Begins a system block that some clients change with every call. It is removed from the prompt,
since no two prompts would share a page otherwise."""


@with_config(ConfigDict(strict=True))
class CacheControl(TypedDict):
    """Marks the end of a prefix to cache. Every prefix is cached; the mark retains its pages."""

    type: Literal["ephemeral"]
    ttl: NotRequired[Literal["5m", "1h"]]


@with_config(ConfigDict(strict=True))
class MarkedText(TextPart):
    cache_control: NotRequired[CacheControl | None]


@with_config(ConfigDict(strict=True))
class ThinkingPart(TypedDict):
    type: Literal["thinking"]
    thinking: PromptText


@with_config(ConfigDict(strict=True))
class RedactedPart(TypedDict):
    """Ignored: only the server that wrote it can read it."""

    type: Literal["redacted_thinking"]


@with_config(ConfigDict(strict=True))
class ToolUsePart(TypedDict):
    type: Literal["tool_use"]
    id: ToolText
    name: ToolText
    input: dict[str, object]
    cache_control: NotRequired[CacheControl | None]


@with_config(ConfigDict(strict=True))
class ToolResultPart(TypedDict):
    type: Literal["tool_result"]
    tool_use_id: ToolText
    content: NotRequired[Content | None]
    cache_control: NotRequired[CacheControl | None]


MessagePart = Annotated[
    Annotated[MarkedText, Tag("<text>")]
    | Annotated[ThinkingPart, Tag("<thinking>")]
    | Annotated[RedactedPart, Tag("<redacted_thinking>")]
    | Annotated[ToolUsePart, Tag("<tool_use>")]
    | Annotated[ToolResultPart, Tag("<tool_result>")],
    Discriminator(tag_by_type("text", "thinking", "redacted_thinking", "tool_use", "tool_result")),
]


class TurnMessage(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: TextOrParts[MessagePart]

    def to_messages(self, names: dict[str, str]) -> Iterator[Message]:
        """Each tool result becomes a message of its own. `names` maps call ids to tool names and is
        updated."""
        if isinstance(self.content, str):
            yield Message(self.role, self.content)
            return
        texts, thoughts, calls = [], [], []
        for part in self.content:
            match part["type"]:
                case "text":
                    texts.append(part["text"])
                case "thinking":
                    thoughts.append(part["thinking"])
                case "tool_use":
                    names[part["id"]] = part["name"]
                    calls.append(ToolCall(part["id"], part["name"], json.dumps(part["input"])))
                case "tool_result":
                    answered = part["tool_use_id"]
                    content = joined(part.get("content"))
                    name = names.get(answered, "")
                    yield Message("tool", content, tool_call_id=answered, name=name)
        if texts or thoughts or calls:
            reasoning = "\n".join(thoughts)
            yield Message(self.role, "\n".join(texts), tuple(calls), reasoning=reasoning)


class MessagesTool(StrictModel):
    type: Literal["custom"] = "custom"
    name: ToolText
    description: ToolText = ""
    input_schema: dict[str, object]
    cache_control: CacheControl | None = None

    def tool(self) -> Tool:
        return Tool(self.name, self.description, json.dumps(self.input_schema))


class MessagesToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolText = ""


class Thinking(StrictModel):
    type: ShortText


class JsonOutput(StrictModel):
    type: Literal["json_schema"]
    json_schema: dict[str, object] = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: Effort | None = None
    format: JsonOutput | None = None


_MODES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
_SWITCHES = {"enabled": True, "disabled": False}


class CountTokensRequest(RequestModel):
    """The fields of a prompt."""

    model: ShortText = about("A name from /v1/models. Absent: the only served model.", "")
    messages: Annotated[
        list[TurnMessage], Field(fail_fast=True, min_length=1, max_length=bounds.MAX_MESSAGES)
    ]
    system: TextOrParts[MarkedText] | None = about("The system prompt.")
    tools: Annotated[list[MessagesTool], Field(fail_fast=True, max_length=bounds.MAX_TOOLS)] = (
        about("Functions that the model may ask the caller to call.", ())
    )
    tool_choice: MessagesToolChoice | None = about("Whether a tool is called.")
    thinking: Thinking | None = about(
        "Whether the model thinks first, if its chat template supports enable_thinking."
    )
    output_config: OutputConfig | None = about("How long to think; a JSON Schema of the answer.")
    output_format: JsonOutput | None = about("Older name of output_config.format.")

    unserved: ClassVar[dict[str, Unserved]] = {
        "mcp_servers": Unserved("tools that the server calls", ([],)),
        "container": Unserved("containers"),
        "thread": Unserved("conversations kept by the server; send all messages"),
    }

    def chat_prompt(self) -> ChatPrompt:
        """If the last message is the assistant's, the answer continues it."""
        names: dict[str, str] = {}
        rules = self._system()
        system = [Message("system", rules)] if rules else []
        messages = [each for turn in self.messages for each in turn.to_messages(names)]
        last = messages[-1] if messages else None
        continued = last is not None and last.role == "assistant" and not last.tool_calls
        effort = self.output_config.effort if self.output_config else None
        thinks = _SWITCHES.get(self.thinking.type) if self.thinking else None
        switches = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
        chat = ChatPrompt(
            (*system, *messages),
            template_kwargs=template_kwargs(effort, switches),
            end="continued" if continued else "open",
        )
        choice = self.tool_choice or MessagesToolChoice(type="auto")
        allowed = [choice.name] if choice.type == "tool" else []
        tools = [each.tool() for each in self.tools]
        return choose_tools(chat, tools, _MODES[choice.type], allowed)

    def _system(self) -> str:
        if not isinstance(self.system, list):
            return self.system or ""
        return joined([part for part in self.system if not part["text"].startswith(BILLING)])


class MessagesRequest(CountTokensRequest, GenerationRequest):
    max_tokens: TokenCount = Field(description="Maximum tokens of the answer.")
    cache_control: CacheControl | None = about("The same as at the prompt's last block.")
    stop_sequences: StopList = about("The text is cut before the first of these.", ())

    unserved: ClassVar[dict[str, Unserved]] = {
        **GenerationRequest.unserved,
        **CountTokensRequest.unserved,
        **chat_fields("message", "output_config.format"),
        "stop": Unserved("a field of chats; send stop_sequences", ([],)),
        "max_completion_tokens": Unserved("a field of chats; send max_tokens"),
        "reasoning_effort": Unserved("a field of chats; send output_config.effort"),
    }

    def _retain_seconds(self) -> int:
        """The longest ttl of all marks."""
        marks = [mark for mark in self._marks() if mark]
        times = [seconds_of(mark.get("ttl", "5m")) for mark in marks]
        return max(times, default=super()._retain_seconds())

    def _marks(self) -> Iterator[CacheControl | None]:
        yield self.cache_control
        yield from (tool.cache_control for tool in self.tools)
        for content in (self.system, *(message.content for message in self.messages)):
            for part in content if isinstance(content, list) else ():
                match part["type"]:
                    case "text" | "tool_use" | "tool_result":
                        yield part.get("cache_control")

    def requests(self, request_id: str, defaults: GenerationDefaults) -> tuple[Request, ...]:
        form = (self.output_config and self.output_config.format) or self.output_format
        request = self._request(
            request_id,
            defaults,
            self.chat_prompt(),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            structure=json_structure(form.json_schema, "output_config.format") if form else None,
        )
        return (request,)

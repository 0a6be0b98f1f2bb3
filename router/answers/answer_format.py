"""How a model writes reasoning and tool calls, from its chat template or the configuration."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.bounds import MAX_STRUCTURE, MAX_TOOLS
from baton.core.errors import InvalidRequest
from baton.core.types import ChatPrompt, Request, Structure, Tool
from baton.router.answers.tool_formats import (
    FORMATS,
    HARMONY,
    HARMONY_ENDS,
    HERMES,
    MARKER,
    ToolFormat,
    tool_format_of,
)
from baton.router.prompts.output_grammar import (
    CallGrammar,
    SpecialId,
    after_reasoning,
    either,
    literal,
    within,
)

ReasoningMarkers = tuple[str, str]
"""Before and after reasoning."""

THINK: ReasoningMarkers = ("<think>", "</think>")
# Of Gemma, Mistral, an older Kimi, and all others. A model has the first pair in its template.
REASONING_MARKERS: tuple[ReasoningMarkers, ...] = (
    ("<|channel>thought", "<channel|>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    THINK,
)
_TOOL_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    tools: ToolFormat
    reasoning: bool
    reasoning_markers: ReasoningMarkers = THINK

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that the splitters need as text, even if they are special."""
        begin, end = self.reasoning_markers
        reasoning = (begin, *MARKER.findall(begin), end) if self.reasoning else ()
        harmony = HARMONY_ENDS if self.tools is HARMONY else ()
        return (*self.tools.markers, *harmony, *reasoning)

    def opens_reasoning(self, rendered: str) -> bool:
        """True if a rendered prompt ends within the reasoning."""
        return self.reasoning and rendered.rstrip().endswith(self.reasoning_markers[0])

    def structures(self, request: Request, special_id: SpecialId) -> list[Structure]:
        """Returns the structures of which an answer must follow one; nothing if any text will
        do."""
        chat, wanted = request.prompt, request.structure
        if not isinstance(chat, ChatPrompt) or not chat.tools:
            return [wanted] if wanted else []
        if chat.must_call:
            return [self.forced_call(chat, special_id)]
        return [self.forced_call(chat, special_id), wanted] if wanted else []

    def composed(
        self,
        grammars: Sequence[str],
        request: Request,
        special_id: SpecialId,
        *,
        thinking: bool,
    ) -> str:
        """Returns the grammar of an answer that follows one of `grammars`, those of
        `structures`."""
        chat = request.prompt if isinstance(request.prompt, ChatPrompt) else None
        if self.tools is HARMONY and chat and chat.end == "open":
            return _in_messages(grammars, special_id, called=chat.must_call)
        grammar = either(*grammars) if len(grammars) == 2 else grammars[0]
        end = self.reasoning_markers[1]
        return after_reasoning(grammar, end, special_id(end)) if thinking else grammar

    def forced_call(self, chat: ChatPrompt, special_id: SpecialId) -> Structure:
        """Returns the structure of an answer that is exactly one tool call."""
        return Structure("call", CallGrammar(self.tools, special_id).grammar(chat.callable_tools))


def _in_messages(grammars: Sequence[str], special_id: SpecialId, *, called: bool) -> str:
    """Returns the grammar of gpt-oss's messages: reasoning, then a call or the content. A call's
    grammar includes its header."""
    *calls, last = grammars
    if not called:
        header = literal("<|channel|>final<|message|>", special_id)
        last = within(f"start: {header} @final", last, "final")
    before, after = (
        literal(text, special_id)
        for text in ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
    )
    start = f"start: reasoning? @answer\nreasoning: {before} /(.|\\n)*/ {after}"
    return within(start, either(calls[0], last) if calls else last, "answer")


PLAIN = AnswerFormat(HERMES, reasoning=False)


def answer_format(template: str, tools: str, reasoning: str, plain: str = "") -> AnswerFormat:
    """Returns the configured format; "auto" takes it from the chat template. `plain` is the one of
    chats without tools, if it is another."""
    form = tool_format_of(template) if tools == "auto" else FORMATS[tools]
    shows = template + plain
    found = [each for each in REASONING_MARKERS if any(marker in shows for marker in each)]
    shown = form is HARMONY or bool(found)
    thinks = shown if reasoning == "auto" else reasoning == "on"
    return AnswerFormat(form, thinks, found[0] if found else THINK)


def with_tools(
    chat: ChatPrompt,
    tools: Sequence[Tool],
    *,
    must_call: bool,
    allowed: Sequence[str],
    prefix: str = "",
) -> ChatPrompt:
    """Returns the chat with checked tools. Errors have `prefix` before the field's name."""
    field, choice_field = f"{prefix}tools", f"{prefix}tool_choice"
    checked = tuple(_checked_tool(tool, field) for tool in tools)
    names = [tool.name for tool in checked]
    if len(names) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools", field=field)
    if len(names) > len(set(names)):
        raise InvalidRequest("two tools have the same name", field=field)
    if must_call and not names:
        raise InvalidRequest("a tool must be called, but there is none", field=choice_field)
    if unknown := [name for name in allowed if name not in names]:
        raise InvalidRequest(f"there is no tool {unknown[0]!r} to call", field=choice_field)
    return dataclasses.replace(
        chat, tools=checked, must_call=must_call, allowed_tools=tuple(allowed)
    )


def _checked_tool(tool: Tool, field: str) -> Tool:
    if not _TOOL_NAME.fullmatch(tool.name):
        raise InvalidRequest(
            "a tool's name is 1 to 64 letters, digits, underscores and dashes", field=field
        )
    if len(tool.parameters) > MAX_STRUCTURE:
        raise InvalidRequest(f"the parameters of {tool.name} are too long", field=field)
    try:
        schema = json.loads(tool.parameters or '{"type": "object"}')
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"the parameters of {tool.name} are no JSON Schema", field=field)
    kind = schema.get("type", "object")
    # Arguments are always an object, even if the schema also allows null.
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(
            f"the parameters of {tool.name} must have the type object", field=field
        )
    parameters = {"type": "object", **schema} | {"type": "object"}  # the type comes first
    return dataclasses.replace(tool, parameters=json.dumps(parameters))

"""How a model writes reasoning and tool calls, and how its chat template shows that.

hermes        <tool_call>{"name": …, "arguments": {…}}</tool_call>, one after the other
llama3        {"name": …, "parameters": {…}}, the whole answer; several separated by ;
              with or without <|python_tag|> in front
mistral       [TOOL_CALLS][{"name": …, "arguments": {…}}, …]
mistral-args  [TOOL_CALLS]name[ARGS]{…}, one after the other, as newer Mistral models write;
              some write [CALL_ID] and an id before [ARGS]
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.bounds import MAX_STRUCTURE, MAX_TOOLS
from baton.core.errors import InvalidRequest
from baton.core.types import ChatPrompt, Request, Structure, Tool
from baton.router.prompts.output_grammar import ONE_LINE

THINK, END_THINK = "<think>", "</think>"
_TOOL_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")

SpecialId = Callable[[str], int | None]
"""The id of a special token, which no text encodes to; None for any other text."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    opener: str  # before calls
    signs: tuple[str, ...]  # strings in a chat template that show the format
    closer: str = ""  # after each call, or after all
    arguments: str = "arguments"  # key of the arguments
    separator: str = ""  # between two calls
    listed: bool = False  # calls are a JSON list
    bare: bool = False  # an answer that begins with { is a call
    divider: str = ""  # between name and arguments, where they are no JSON object
    id_mark: str = ""  # before an id between the two
    short_ids: bool = False  # templates accept only ids of nine letters and digits

    def new_id(self) -> str:
        if self.short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def grammar(self, tools: Sequence[Tool], special_id: SpecialId) -> str:
        """One call of one of the tools, in llguidance's Lark."""
        opener = _literal(self.opener, special_id)
        if self.divider:
            return self._named_grammar(tools, opener, _literal(self.divider, special_id))
        call = _json(self._call_schema(tools))
        if self.bare:
            return f"start: {call}"
        if self.listed:
            return f'start: {opener} "[" call "]"\ncall: {call}'
        return f'start: {opener} "\\n" call "\\n" {json.dumps(self.closer)}\ncall: {call}'

    def _named_grammar(self, tools: Sequence[Tool], opener: str, divider: str) -> str:
        calls = [
            f"call_{index}: {json.dumps(tool.name)} {divider} arguments_{index}\n"
            f"arguments_{index}: {_json(json.loads(tool.parameters))}"
            for index, tool in enumerate(tools)
        ]
        names = " | ".join(f"call_{index}" for index in range(len(tools)))
        return "\n".join((f"start: {opener} ({names})", *calls))

    def _call_schema(self, tools: Sequence[Tool]) -> dict[str, object]:
        calls: list[dict[str, object]] = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    self.arguments: json.loads(tool.parameters),
                },
                "required": ["name", self.arguments],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _literal(marker: str, special_id: SpecialId) -> str:
    token = special_id(marker)
    return json.dumps(marker) if token is None else f"<[{token}]>"


def _json(schema: dict[str, object]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': ONE_LINE})}"


HERMES = ToolFormat("hermes", "<tool_call>", ("<tool_call>",), closer="</tool_call>")
LLAMA3 = ToolFormat(
    "llama3",
    "<|python_tag|>",
    ("<|python_tag|>", "ipython"),
    arguments="parameters",
    separator=";",
    bare=True,
)
_CALLS = "[TOOL_CALLS]"
MISTRAL = ToolFormat("mistral", _CALLS, (_CALLS,), separator=",", listed=True, short_ids=True)
MISTRAL_ARGS = ToolFormat(
    "mistral-args", _CALLS, ("[ARGS]",), divider="[ARGS]", id_mark="[CALL_ID]", short_ids=True
)

# A template has the first format whose sign it contains.
FORMATS = {each.name: each for each in (HERMES, LLAMA3, MISTRAL_ARGS, MISTRAL)}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    tools: ToolFormat
    reasoning: bool

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that the splitters need as text, even where they are special."""
        tools = self.tools
        reasoning = (THINK, END_THINK) if self.reasoning else ()
        return (tools.opener, tools.closer, tools.divider, tools.id_mark, *reasoning)

    def opens_reasoning(self, rendered: str) -> bool:
        """Whether a prompt ends within the reasoning."""
        return self.reasoning and rendered.rstrip().endswith(THINK)

    def structures(self, request: Request, special_id: SpecialId) -> list[Structure]:
        """What an answer must follow: any one of these, or nothing where the list is empty."""
        chat, wanted = request.prompt, request.structure
        if not isinstance(chat, ChatPrompt) or not chat.tools:
            return [wanted] if wanted else []
        if chat.must_call:
            return [self.forced_call(chat, special_id)]
        return [self.forced_call(chat, special_id), wanted] if wanted else []

    def forced_call(self, chat: ChatPrompt, special_id: SpecialId) -> Structure:
        """The structure of an answer that is exactly one tool call."""
        return Structure("lark", self.tools.grammar(chat.callable_tools, special_id))


PLAIN = AnswerFormat(HERMES, reasoning=False)


def answer_format(template: str, tools: str, reasoning: str) -> AnswerFormat:
    """The format as configured, or as the chat template shows it where that is "auto"."""
    form = tool_format_of(template) if tools == "auto" else FORMATS[tools]
    shown = THINK in template or END_THINK in template
    return AnswerFormat(form, shown if reasoning == "auto" else reasoning == "on")


def tool_format_of(template: str) -> ToolFormat:
    """The tool format that a chat template shows; the most common one where it shows none."""
    return next(
        (each for each in FORMATS.values() if any(sign in template for sign in each.signs)), HERMES
    )


def with_tools(
    chat: ChatPrompt, tools: Sequence[Tool], *, must_call: bool, allowed: Sequence[str], field: str
) -> ChatPrompt:
    """The chat with checked tools; errors name `field`."""
    checked = tuple(_checked_tool(tool, field) for tool in tools)
    names = [tool.name for tool in checked]
    if len(names) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools", field=field)
    if len(names) > len(set(names)):
        raise InvalidRequest("two tools have the same name", field=field)
    if must_call and not names:
        raise InvalidRequest("a tool must be called, and there is none", field=field)
    if unknown := next((name for name in allowed if name not in names), None):
        raise InvalidRequest(f"there is no tool {unknown!r} to call", field=field)
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
    except ValueError:
        schema = None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"the parameters of {tool.name} are no JSON Schema", field=field)
    # Arguments are always an object.
    return dataclasses.replace(tool, parameters=json.dumps({"type": "object", **schema}))

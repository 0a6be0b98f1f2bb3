"""How models write tool calls, and how to tell which model writes which way.

hermes   <tool_call>{"name": …, "arguments": {…}}</tool_call>, one after the other
llama3   {"name": …, "parameters": {…}}, the whole answer; several parted by ;
         with or without <|python_tag|> in front
mistral  [TOOL_CALLS][{"name": …, "arguments": {…}}, …]
mistral-args
         [TOOL_CALLS]name[ARGS]{…}, one after the other, as newer models of Mistral's do;
         some write [CALL_ID] and an id before [ARGS]
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.types import Tool
from baton.router.prompts.output_grammar import ONE_LINE

SpecialId = Callable[[str], int | None]
"""The id of what is one special token, which no text can stand for; None for anything else."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    # What stands before calls, and after each or all of them.
    opener: str
    closer: str
    # What arguments are called.
    arguments: str
    # What stands between two calls.
    separator: str = ""
    # Whether calls are a JSON list.
    listed: bool = False
    # Whether an answer that begins with { is a call.
    bare: bool = False
    # What stands between a call's name and its arguments, where the two are no JSON object.
    divider: str = ""
    # What stands before an id between the two.
    id_mark: str = ""
    # Whether templates take only ids of nine letters and digits.
    short_ids: bool = False
    # What in a chat template gives the format away.
    signs: tuple[str, ...] = ()

    def new_id(self) -> str:
        if self.short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    @property
    def marks(self) -> tuple[str, ...]:
        """What belongs to a call and may be a special token."""
        return self.opener, self.closer, self.divider, self.id_mark

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


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments", signs=("<tool_call>",))
LLAMA3 = ToolFormat(
    "llama3",
    "<|python_tag|>",
    "",
    "parameters",
    separator=";",
    bare=True,
    signs=("<|python_tag|>", "ipython"),
)
MISTRAL = ToolFormat(
    "mistral",
    "[TOOL_CALLS]",
    "",
    "arguments",
    separator=",",
    listed=True,
    short_ids=True,
    signs=("[TOOL_CALLS]",),
)
MISTRAL_ARGS = ToolFormat(
    "mistral-args",
    "[TOOL_CALLS]",
    "",
    "arguments",
    divider="[ARGS]",
    id_mark="[CALL_ID]",
    short_ids=True,
    signs=("[ARGS]",),
)

# A template is of the first whose sign it has.
FORMATS = {each.name: each for each in (HERMES, LLAMA3, MISTRAL_ARGS, MISTRAL)}


def _literal(mark: str, special_id: SpecialId) -> str:
    token = special_id(mark)
    return json.dumps(mark) if token is None else f"<[{token}]>"


def _json(schema: dict[str, object]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': ONE_LINE})}"


def tool_format_of(template: str) -> ToolFormat:
    """How a model with this chat template writes calls; the commonest way where it does not say."""
    return next(
        (each for each in FORMATS.values() if any(sign in template for sign in each.signs)), HERMES
    )

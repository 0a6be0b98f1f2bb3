"""How models write tool calls, and how to tell which model writes which way.

hermes   <tool_call>{"name": …, "arguments": {…}}</tool_call>, one after the other
llama3   {"name": …, "parameters": {…}}, the whole answer; several parted by ;
         with or without <|python_tag|> in front
mistral  [TOOL_CALLS][{"name": …, "arguments": {…}}, …]
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass

from core.types import Tool
from router.grammar import ONE_LINE


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
    # What in a chat template gives the format away.
    signs: tuple[str, ...] = ()

    def new_id(self) -> str:
        if self is MISTRAL:  # its templates take no other
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def grammar(self, tools: Sequence[Tool], opener_id: int | None) -> str:
        """One call of one of the tools, in llguidance's Lark. `opener_id` where the opener is one
        special token, which no text can stand for."""
        opener = json.dumps(self.opener) if opener_id is None else f"<[{opener_id}]>"
        call = f"%json {json.dumps({**self._call_schema(tools), 'x-guidance': ONE_LINE})}"
        if self.bare:
            return f"start: {call}"
        if self.listed:
            return f'start: {opener} "[" call "]"\ncall: {call}'
        return f'start: {opener} "\\n" call "\\n" {json.dumps(self.closer)}\ncall: {call}'

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
    signs=("[TOOL_CALLS]",),
)

FORMATS = {each.name: each for each in (HERMES, LLAMA3, MISTRAL)}


def tool_format_of(template: str) -> ToolFormat:
    """How a model with this chat template writes calls; the commonest way where it does not say."""
    return next(
        (each for each in FORMATS.values() if any(sign in template for sign in each.signs)), HERMES
    )

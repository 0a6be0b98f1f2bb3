"""How a model writes what is not plain answer: its thoughts, and its calls of tools."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.types import ChatPrompt, Request, Structure
from baton.router.answers.parts import Chained, Plain, Splitter
from baton.router.answers.reasoning import CLOSER, OPENER, ReasoningSplitter
from baton.router.answers.tool_format import FORMATS, HERMES, SpecialId, ToolFormat, tool_format_of
from baton.router.answers.tool_parser import ToolCallParser


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    tools: ToolFormat
    thinks: bool

    @property
    def marks(self) -> tuple[str, ...]:
        """Tokens that must be seen as text, though they may be special."""
        thoughts = (OPENER, CLOSER) if self.thinks else ()
        return (*self.tools.marks, *thoughts)

    def is_open(self, rendered: str) -> bool:
        """Whether a prompt ends within the thoughts."""
        return self.thinks and rendered.rstrip().endswith(OPENER)

    def splitter(self, chat: ChatPrompt | None, *, opened: bool) -> Splitter:
        """For one answer; without a chat it is plain text."""
        if chat is None:
            return Plain()
        thoughts = ReasoningSplitter(opened=opened) if self.thinks else None
        calls = ToolCallParser(self.tools, _names(chat)) if chat.tools else None
        if thoughts and calls:
            return Chained(thoughts, calls)
        return thoughts or calls or Plain()

    def structures(self, request: Request, special_id: SpecialId) -> list[Structure]:
        """What an answer may read as: any one of these, or anything where there are none."""
        chat, asked = request.prompt, request.structure
        if not isinstance(chat, ChatPrompt) or not chat.tools:
            return [asked] if asked else []
        if chat.must_call:
            return [self.forced_call(chat, special_id)]
        return [self.forced_call(chat, special_id), asked] if asked else []

    def forced_call(self, chat: ChatPrompt, special_id: SpecialId) -> Structure:
        """What an answer that calls a tool, and does nothing else, reads as: one call."""
        wanted = [tool for tool in chat.tools if chat.tool_name in ("", tool.name)]
        return Structure("lark", self.tools.grammar(wanted, special_id))


PLAIN = AnswerFormat(HERMES, thinks=False)


def answer_format(template: str, tools: str, thoughts: str) -> AnswerFormat:
    """As a chat template shows it, or as it is configured."""
    form = tool_format_of(template) if tools == "auto" else FORMATS[tools]
    thinks = OPENER in template or CLOSER in template if thoughts == "auto" else thoughts == "on"
    return AnswerFormat(form, thinks)


def _names(chat: ChatPrompt) -> set[str]:
    return {tool.name for tool in chat.tools}

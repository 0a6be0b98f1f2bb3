"""Splits what gpt-oss writes, which is in messages (the harmony format):

    <|channel|>analysis<|message|>…<|end|>                             reasoning
    <|start|>assistant<|channel|>commentary to=functions.name …<|message|>{…}<|call|>   a call
    <|start|>assistant<|channel|>final<|message|>…<|return|>           content, as any other

The prompt has the first <|start|>assistant. The name may also be before the channel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from baton.core.types import Tool
from baton.router.answers.answer_events import AnswerDelta, ToolCallDelta
from baton.router.answers.splitters import SteppedSplitter, Steps, held_back
from baton.router.answers.tool_formats import HARMONY_ENDS

_MESSAGE = "<|message|>"
_END = re.compile("|".join(map(re.escape, HARMONY_ENDS)))
_HEADERS = ("<|channel|>", "<|start|>", _MESSAGE, " to=")
_RECIPIENT = re.compile(r"to=functions\.([a-zA-Z0-9_-]+)")


class HarmonySplitter(SteppedSplitter):
    def __init__(
        self, tools: Sequence[Tool], new_id: Callable[[], str], *, reasoning: bool = True
    ) -> None:
        """Without `reasoning` it counts as content."""
        super().__init__()
        self._tools = {tool.name for tool in tools}
        self._new_id = new_id
        self._reasoning = reasoning
        self._calls = 0
        self._emit: Callable[[str], None] | None = None  # a message's text; None in its header

    def flush(self, delta: AnswerDelta) -> None:
        """Half a header is dropped."""
        self._delta = delta
        if self._emit:
            self._emit(self._held)

    def _split(self) -> Steps:
        while not self._held:
            yield
        # An answer that continues a message has no header.
        if not any(self._held.startswith(each[: len(self._held)]) for each in _HEADERS):
            yield from self._message(self._add_content)
        while True:
            while _MESSAGE not in self._held:
                yield
            header, _, self._held = self._held.partition(_MESSAGE)
            yield from self._message(self._target(header))

    def _target(self, header: str) -> Callable[[str], None]:
        recipient = _RECIPIENT.search(header)
        if recipient and recipient[1] in self._tools:
            call = ToolCallDelta(self._calls, self._new_id(), recipient[1])
            self._delta.tool_calls += (call,)
            self._calls += 1
            return self._add_arguments
        if self._reasoning and "<|channel|>analysis" in header:
            return self._add_reasoning
        return self._add_content

    def _message(self, emit: Callable[[str], None]) -> Steps:
        """Emits a message's text up to its end."""
        self._emit = emit
        while not (end := _END.search(self._held)):
            sure = len(self._held) - held_back(self._held, HARMONY_ENDS)
            emit(self._held[:sure])
            self._held = self._held[sure:]
            yield
        emit(self._held[: end.start()])
        self._held, self._emit = self._held[end.end() :], None

    def _add_content(self, text: str) -> None:
        self._delta.text += text

    def _add_reasoning(self, text: str) -> None:
        self._delta.reasoning += text

    def _add_arguments(self, text: str) -> None:
        if not text:
            return
        delta, index = self._delta, self._calls - 1
        if not (delta.tool_calls and delta.tool_calls[-1].index == index):
            delta.tool_calls += (ToolCallDelta(index),)
        delta.tool_calls[-1].arguments += text

"""Splitters: separate an answer's text into content, reasoning and tool calls while it streams.

    text ─▶ ReasoningSplitter ─content─▶ ToolCallSplitter ─content─▶ ContentSplitter ─▶ AnswerDelta

Each is used only if the model and the request need it (router/answers/answer_format.py), and holds
back only text that may still become a marker. They scan in generators, which yield when they need
more text.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Protocol

from baton.core.types import Tool
from baton.router.answers.answer_events import AnswerDelta, ToolCallDelta
from baton.router.answers.answer_format import THINK, ReasoningMarkers
from baton.router.answers.tool_formats import HARMONY_ENDS

Steps = Generator[None, None, None]

_MESSAGE = "<|message|>"
_END = re.compile("|".join(map(re.escape, HARMONY_ENDS)))
_HEADERS = ("<|channel|>", "<|start|>", _MESSAGE, " to=")
_RECIPIENT = re.compile(r"to=functions\.([a-zA-Z0-9_-]+)")


class Splitter(Protocol):
    def push(self, text: str, delta: AnswerDelta) -> None:
        """Splits the text and adds the parts to the delta."""

    def flush(self, delta: AnswerDelta) -> None:
        """Adds held-back text at the end of the answer."""


class ContentSplitter:
    """Treats all text as content."""

    def push(self, text: str, delta: AnswerDelta) -> None:
        delta.text += text

    def flush(self, delta: AnswerDelta) -> None:
        pass


class SteppedSplitter(ABC):
    """Scans its text in a generator, which yields when it needs more."""

    def __init__(self) -> None:
        self._held = ""  # pushed but not scanned
        self._delta = AnswerDelta("", [])  # passed with the latest text
        self._steps = self._split()

    def push(self, text: str, delta: AnswerDelta) -> None:
        self._held += text
        self._delta = delta
        next(self._steps)

    @abstractmethod
    def _split(self) -> Steps: ...


class ReasoningSplitter(SteppedSplitter):
    """Splits off the reasoning: models write <think> (or another marker), their reasoning, </think>
    and then the content. Some chat templates write the <think> themselves. Drops white space around
    the markers."""

    def __init__(
        self, *, thinking: bool, content: Splitter, markers: ReasoningMarkers = THINK
    ) -> None:
        """`thinking` says that the prompt ends within the reasoning. `content` gets the rest."""
        super().__init__()
        self._begin, self._end = markers
        self._thinking = thinking
        self._content = content

    def flush(self, delta: AnswerDelta) -> None:
        if self._thinking:
            delta.reasoning += self._held.rstrip()
        else:
            self._content.push(self._held, delta)
        self._content.flush(delta)

    def _split(self) -> Steps:
        while not self._thinking:
            begun = self._held.lstrip()
            if begun.startswith(self._begin):
                self._thinking, self._held = True, begun[len(self._begin) :]
            elif self._begin.startswith(begun):
                yield
            else:
                break
        if self._thinking:
            yield from self._think()
        while True:
            held, self._held = self._held, ""
            self._content.push(held, self._delta)
            yield

    def _think(self) -> Steps:
        """Emits the reasoning and drops the white space after it."""
        begun = False
        while self._thinking:
            reasoning, marker, rest = self._held.partition(self._end)
            if not marker:
                reasoning = reasoning[: len(reasoning) - held_back(reasoning, [self._end])]
            reasoning = reasoning.rstrip()
            self._delta.reasoning += reasoning if begun else reasoning.lstrip()
            begun = begun or bool(reasoning)
            self._held = rest if marker else self._held[len(reasoning) :]
            self._thinking = not marker
            if self._thinking:
                yield
        while not (held := self._held.lstrip()):
            self._held = ""
            yield
        self._held = held


class HarmonySplitter(SteppedSplitter):
    """Splits gpt-oss's messages (the harmony format):

        <|channel|>analysis<|message|>…<|end|>                             reasoning
        <|start|>assistant<|channel|>commentary to=functions.name …<|message|>{…}<|call|>   a call
        <|start|>assistant<|channel|>final<|message|>…<|return|>           content
        any other message                                                  content

    The prompt ends with the first <|start|>assistant. The name may also precede the channel.
    """

    def __init__(
        self, tools: Sequence[Tool], new_id: Callable[[], str], *, reasoning: bool = True
    ) -> None:
        """Without `reasoning`, reasoning counts as content."""
        super().__init__()
        self._tools = {tool.name for tool in tools}
        self._new_id = new_id
        self._reasoning = reasoning
        self._calls = 0
        self._emit: Callable[[str], None] | None = None  # takes a message's text; None in headers

    def flush(self, delta: AnswerDelta) -> None:
        """Emits held-back text, unless it is an incomplete header."""
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


def held_back(text: str, markers: Iterable[str]) -> int:
    """Counts the characters at the end of `text` that may begin a marker."""
    longest = 0
    for marker in markers:
        start = text.find(marker[0], max(len(text) - len(marker) + 1, 0))
        while start >= 0 and len(text) - start > longest:
            if marker.startswith(text[start:]):
                longest = len(text) - start
            start = text.find(marker[0], start + 1)
    return longest

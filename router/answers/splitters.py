"""Splitters: separate an answer's text into content, reasoning and tool calls while it streams.

    text ─▶ ReasoningSplitter ─content─▶ ToolCallSplitter ─content─▶ ContentSplitter ─▶ AnswerDelta

Each is used only where the model and the request need it (router/answers/answer_format.py), and
holds back only text that may still become a marker. They scan in generators, which yield where
they need more text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from typing import Protocol

from baton.router.answers.answer_events import AnswerDelta
from baton.router.answers.answer_format import THINK, Thoughts

Steps = Generator[None, None, None]


class Splitter(Protocol):
    def push(self, text: str, delta: AnswerDelta) -> None:
        """Adds what the text contributes to the delta."""

    def flush(self, delta: AnswerDelta) -> None:
        """Adds what was held back; no more text comes."""


class ContentSplitter:
    """All text is content."""

    def push(self, text: str, delta: AnswerDelta) -> None:
        delta.text += text

    def flush(self, delta: AnswerDelta) -> None:
        pass


class SteppedSplitter(ABC):
    """Reads its text in a generator, which yields where it needs more."""

    def __init__(self) -> None:
        self._held = ""  # pushed, not read yet
        self._delta = AnswerDelta("", [])  # of the text that was pushed last
        self._steps = self._split()

    def push(self, text: str, delta: AnswerDelta) -> None:
        self._held += text
        self._delta = delta
        next(self._steps)

    @abstractmethod
    def _split(self) -> Steps: ...


class ReasoningSplitter(SteppedSplitter):
    """A reasoning model writes <think> (or another mark), its reasoning, </think> and then its
    content. Some chat templates write the <think> themselves. White space around the
    markers is dropped."""

    def __init__(self, *, thinking: bool, content: Splitter, thoughts: Thoughts = THINK) -> None:
        """`thinking` when the prompt ends within the reasoning; `content` gets the rest."""
        super().__init__()
        self._begin, self._end = thoughts
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
        """Emits the reasoning, and drops the white space after it."""
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


def held_back(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        start = text.find(marker[0], max(len(text) - len(marker) + 1, 0))
        while start >= 0 and len(text) - start > longest:
            if marker.startswith(text[start:]):
                longest = len(text) - start
            start = text.find(marker[0], start + 1)
    return longest

"""Splitters: separate an answer's text into content, reasoning and tool calls while it streams.

    text ─▶ ReasoningSplitter ─content─▶ ToolCallSplitter ─content─▶ ContentSplitter ─▶ AnswerDelta

Each is used only where the model and the request need it (router/answers/answer_format.py), and
holds back only text that may still become a marker.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Protocol

from baton.router.answers.answer_events import AnswerDelta

THINK, END_THINK = "<think>", "</think>"


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


class _State(Enum):
    UNDECIDED = auto()  # only white space so far
    THINKING = auto()
    PAUSING = auto()  # white space between reasoning and content
    ANSWERING = auto()


class ReasoningSplitter:
    """A reasoning model writes <think>, its reasoning, </think> and then its content. Some chat
    templates write the <think> themselves. White space around the markers is dropped."""

    def __init__(self, *, thinking: bool, content: Splitter) -> None:
        """`thinking` when the prompt ends within the reasoning; `content` gets the rest."""
        self._state = _State.THINKING if thinking else _State.UNDECIDED
        self._content = content
        self._held = ""
        self._begun = False  # some reasoning has been emitted

    def push(self, text: str, delta: AnswerDelta) -> None:
        self._held += text
        before = None
        while self._state is not before:
            before = self._state
            self._step(delta)

    def flush(self, delta: AnswerDelta) -> None:
        if self._state is _State.THINKING:
            delta.reasoning += self._held.rstrip()
        elif self._state is not _State.PAUSING:
            self._content.push(self._held, delta)
        self._content.flush(delta)

    def _step(self, delta: AnswerDelta) -> None:
        match self._state:
            case _State.UNDECIDED:
                self._decide()
            case _State.THINKING:
                self._think(delta)
            case _State.PAUSING:
                self._held = self._held.lstrip()
                if self._held:
                    self._state = _State.ANSWERING
            case _State.ANSWERING:
                held, self._held = self._held, ""
                self._content.push(held, delta)

    def _decide(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(THINK):
            self._state, self._held = _State.THINKING, begun[len(THINK) :]
        elif not THINK.startswith(begun):
            self._state = _State.ANSWERING

    def _think(self, delta: AnswerDelta) -> None:
        reasoning, marker, rest = self._held.partition(END_THINK)
        if marker:
            self._state, self._held = _State.PAUSING, rest
            reasoning = reasoning.rstrip()
        else:
            open_end = len(reasoning) - held_back(reasoning, [END_THINK])
            reasoning = reasoning[:open_end].rstrip()
            self._held = self._held[len(reasoning) :]
        if not self._begun:
            reasoning = reasoning.lstrip()
            self._begun = bool(reasoning)
        delta.reasoning += reasoning


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

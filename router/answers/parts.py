"""The parts of an answer: what is said, what is thought, which tools are called."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from baton.router.answers.answer_events import ToolCallDelta


@dataclass(slots=True)
class Parts:
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __add__(self, other: Parts) -> Parts:
        return Parts(
            self.text + other.text,
            self.reasoning + other.reasoning,
            self.tool_calls + other.tool_calls,
        )


class Splitter(Protocol):
    """Takes an answer's text as it comes, and tells its parts."""

    def push(self, text: str) -> Parts: ...

    def flush(self) -> Parts:
        """What was held back, now that no more text comes."""


class Plain:
    """All is said."""

    def push(self, text: str) -> Parts:
        return Parts(text)

    def flush(self) -> Parts:
        return Parts()


class Chained:
    """What `first` says goes through `second`."""

    def __init__(self, first: Splitter, second: Splitter) -> None:
        self._first = first
        self._second = second

    def push(self, text: str) -> Parts:
        return self._pass_on(self._first.push(text))

    def flush(self) -> Parts:
        return self._pass_on(self._first.flush()) + self._second.flush()

    def _pass_on(self, parts: Parts) -> Parts:
        return Parts(reasoning=parts.reasoning) + self._second.push(parts.text)


def held_back(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    return max(
        (
            length
            for marker in markers
            for length in range(1, min(len(marker), len(text) + 1))
            if text.endswith(marker[:length])
        ),
        default=0,
    )

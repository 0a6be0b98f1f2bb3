"""From the events of a call's answers to what is sent: one object, or one chunk after the other."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Protocol

from baton.core.types import FinishReason
from baton.router.answers.answer_events import (
    AnswerDelta,
    AnswerEvent,
    Finished,
    ScoredToken,
    Started,
    ToolCallDelta,
)
from baton.router.edges.http.fields import Json
from baton.router.edges.http.generation import Asked

FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
}
DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_SOME_TEXT = "\0text\0"


@dataclass(frozen=True, slots=True)
class Piece:
    """What is told of an answer at once: all of it, or what is new."""

    index: int
    text: str
    finish: str | None
    # Whether nothing was told of the answer before.
    first: bool = True
    # One a token, those of a prompt that it begins with included; None where nobody asked.
    scores: Sequence[ScoredToken] | None = None
    # Characters of the tokens that were told before.
    offset: int = 0
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()
    # The prompt's, apart; None where nobody asked, or they were told before.
    prompt_scores: Sequence[ScoredToken] | None = None


class Api(Protocol):
    """How one endpoint reads its calls and shapes its answers."""

    prompt_field: str
    id_prefix: str
    # The names of its objects.
    whole: str
    chunk: str

    def read(self, body: Json, request_id: str) -> Asked: ...

    def choice(self, piece: Piece) -> Json:
        """A whole answer."""

    def delta(self, piece: Piece) -> Json:
        """What is new of an answer."""


@dataclass(slots=True)
class Usage:
    """What a call took, over all its answers. Each prompt counts once."""

    answers_each: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def note(self, event: AnswerEvent) -> None:
        if isinstance(event, Started):
            self.prompt_tokens += event.prompt_tokens
        elif isinstance(event, Finished):
            self.completion_tokens += event.completion_tokens
            if event.index % self.answers_each == 0:
                self.cached_tokens += event.cached_tokens

    def tell(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Telling:
    """One call's answers, told whole or in chunks.

    `openings` is what the answers to each prompt begin with.
    """

    def __init__(self, api: Api, asked: Asked, model: str, openings: Sequence[str]) -> None:
        self._api = api
        self._asked = asked
        self._openings = openings
        self._usage = Usage(asked.n)
        # By answer of which something was told: what is around its next text.
        self._around: dict[int, tuple[bytes, bytes]] = {}
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._scores: defaultdict[int, list[ScoredToken]] = defaultdict(list)
        self._prompt_scores: dict[int, tuple[ScoredToken, ...]] = {}
        self._offsets: defaultdict[int, int] = defaultdict(int)
        self._thoughts: defaultdict[int, list[str]] = defaultdict(list)
        self._calls: defaultdict[int, list[ToolCallDelta]] = defaultdict(list)
        self._finishes: dict[int, str] = {}
        self._head: Json = {
            "id": asked.request_id,
            "object": api.chunk if asked.stream else api.whole,
            "created": int(time.time()),
            "model": model,
        }
        # What every chunk begins with, up to its choices.
        self._chunk_head = b"data: " + encode(self._head)[:-1] + b',"choices":'

    def note(self, event: AnswerEvent) -> None:
        """For an answer that is told whole."""
        self._usage.note(event)
        if isinstance(event, Finished):
            self._finishes[event.index] = FINISH[event.reason]
        elif not isinstance(event, Started):
            self._texts[event.index].append(event.text)
            self._scores[event.index] += self._scores_of(event)
            self._prompt_scores.setdefault(event.index, event.prompt_logprobs)
            self._thoughts[event.index].append(event.reasoning)
            self._calls[event.index] += event.tool_calls

    def whole(self) -> bytes:
        answers = len(self._asked.requests) * self._asked.n
        choices = [self._api.choice(self._whole(index)) for index in range(answers)]
        return encode({**self._head, "choices": choices, "usage": self._usage.tell()})

    def _whole(self, index: int) -> Piece:
        text = self._opening(index) + "".join(self._texts[index])
        return Piece(
            index,
            text,
            self._finishes[index],
            scores=self._scores[index] if self._asked.scored else None,
            offset=self._offsets[index],
            prompt_scores=self._prompt_scores.get(index) if self._asked.prompt_scored else None,
            reasoning="".join(self._thoughts[index]),
            tool_calls=self._calls[index],
        )

    def chunk(self, event: AnswerEvent) -> bytes:
        """What an event adds to a stream; empty when nothing."""
        if isinstance(event, AnswerDelta):
            return self._delta(event)
        self._usage.note(event)
        if isinstance(event, Started):
            return b""
        first = event.index not in self._around
        opening = self._opening(event.index) if first else ""
        piece = Piece(event.index, opening, FINISH[event.reason], first)
        return self._event([self._api.delta(piece)], None)

    def _delta(self, event: AnswerDelta) -> bytes:
        around = self._around.get(event.index)
        scored = event.logprobs or event.prompt_logprobs
        if around and not (scored or event.reasoning or event.tool_calls):
            before, behind = around
            text = event.text
            return before + encode_basestring(text).encode() + behind if text else b""
        piece = self._piece(event, first=not around)
        if not (piece.text or scored or piece.reasoning or piece.tool_calls):
            return b""
        if not around:
            self._around[event.index] = self._around_text(event.index)
        return self._event([self._api.delta(piece)], None)

    def _piece(self, event: AnswerDelta, *, first: bool) -> Piece:
        index = event.index
        text = (self._opening(index) if first else "") + event.text
        scores = self._scores_of(event) or None
        prompt = event.prompt_logprobs if first and self._asked.prompt_scored else None
        offset = self._offsets[index]
        self._offsets[index] += sum(len(each.chosen.text) for each in scores or ())
        parts = event.reasoning, event.tool_calls
        return Piece(index, text, None, first, scores, offset, *parts, prompt)

    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        """What a chunk with only text has before and behind it. Most are like this, and this is
        the same each time."""
        chunk = self._event([self._api.delta(Piece(index, _SOME_TEXT, None, first=False))], None)
        before, _, behind = chunk.partition(encode_basestring(_SOME_TEXT).encode())
        return before, behind

    def _scores_of(self, delta: AnswerDelta) -> tuple[ScoredToken, ...]:
        """Those that stand with its text, behind the prompt's where it is part of it."""
        if not (delta.prompt_logprobs and self._asked.echo and self._asked.scored):
            return delta.logprobs
        # The prompt's tokens end where its text does, whatever stands before it.
        read = sum(len(each.chosen.text) for each in delta.prompt_logprobs)
        self._offsets[delta.index] = len(self._opening(delta.index)) - read
        return delta.prompt_logprobs + delta.logprobs

    def ending(self) -> bytes:
        """What a stream ends with."""
        if not self._asked.include_usage:
            return DONE
        return self._event([], self._usage.tell()) + DONE

    def _opening(self, index: int) -> str:
        return self._openings[index // self._asked.n]

    def _event(self, choices: list[Json], usage: Json | None) -> bytes:
        told = b',"usage":' + encode(usage) if self._asked.include_usage else b""
        return self._chunk_head + encode(choices) + told + b"}\n\n"


def server_sent(content: Json, name: str = "") -> bytes:
    """One server-sent event."""
    named = f"event: {name}\n".encode() if name else b""
    return named + b"data: " + encode(content) + b"\n\n"


def encode(content: Json | list[Json] | None) -> bytes:
    return _ENCODER.encode(content).encode()

"""Renders the events of a call's answers: as one object, or as server-sent chunks."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring

from baton.core.types import FinishReason
from baton.router.answers.answer_events import (
    AnswerDelta,
    AnswerEvent,
    Finished,
    ScoredToken,
    Started,
    ToolCallDelta,
)
from baton.router.edges.http.generation_request import ParsedCall
from baton.router.edges.http.openai_answers import (
    ChoiceDelta,
    FinishName,
    OpenAiApi,
    TokenUsage,
)

FINISH: dict[FinishReason, FinishName] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
}
DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_PLACEHOLDER = "\0text\0"


@dataclass(slots=True)
class _Collected:
    """One answer that is returned whole."""

    texts: list[str] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)
    prompt_scores: Sequence[ScoredToken] | None = None
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    finish: FinishName | None = None


class AnswerRenderer:
    """`openings` is what the answers to each prompt begin with."""

    def __init__(
        self, api: OpenAiApi, call: ParsedCall, model: str, openings: Sequence[str]
    ) -> None:
        self._api = api
        self._call = call
        self._openings = openings
        # Over all answers; each prompt counts once.
        self._prompt_tokens = self._completion_tokens = self._cached_tokens = 0
        # By answer with a first chunk: what surrounds the text in its next ones.
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._offsets: defaultdict[int, int] = defaultdict(int)
        self._collected: defaultdict[int, _Collected] = defaultdict(_Collected)
        self._head: dict[str, object] = {
            "id": call.request_id,
            "object": api.chunk_object if call.stream else api.answer_object,
            "created": int(time.time()),
            "model": model,
        }
        self._chunk_head = b"data: " + encode(self._head)[:-1] + b',"choices":'

    def collect(self, event: AnswerEvent) -> None:
        """Adds an event to `whole`."""
        self._count(event)
        if isinstance(event, Finished):
            self._collected[event.index].finish = FINISH[event.reason]
        elif isinstance(event, AnswerDelta):
            answer = self._collected[event.index]
            answer.texts.append(event.text)
            answer.scores += self._scores_of(event)
            if answer.prompt_scores is None:
                answer.prompt_scores = event.prompt_logprobs
            answer.reasoning.append(event.reasoning)
            answer.tool_calls += event.tool_calls

    def whole(self) -> bytes:
        answers = len(self._call.requests) * self._call.n
        choices = [self._api.choice(self._answer(index)) for index in range(answers)]
        return encode({**self._head, "choices": choices, "usage": self._usage()})

    def _answer(self, index: int) -> ChoiceDelta:
        answer = self._collected[index]
        return ChoiceDelta(
            index,
            self._opening(index) + "".join(answer.texts),
            answer.finish,
            scores=answer.scores if self._call.scored else None,
            offset=self._offsets[index],
            prompt_scores=answer.prompt_scores if self._call.prompt_scored else None,
            reasoning="".join(answer.reasoning),
            tool_calls=answer.tool_calls,
        )

    def chunk(self, event: AnswerEvent) -> bytes:
        """What an event adds to a stream; may be empty."""
        if isinstance(event, AnswerDelta):
            return self._delta(event)
        self._count(event)
        if isinstance(event, Started):
            return b""
        first = event.index not in self._frames
        opening = self._opening(event.index) if first else ""
        last = ChoiceDelta(event.index, opening, FINISH[event.reason], first)
        return self._event([self._api.delta(last)], None)

    def _delta(self, event: AnswerDelta) -> bytes:
        frame = self._frames.get(event.index)
        scored = event.logprobs or event.prompt_logprobs
        if frame and not (scored or event.reasoning or event.tool_calls):
            before, behind = frame
            text = event.text
            return before + encode_basestring(text).encode() + behind if text else b""
        delta = self._choice_delta(event, first=not frame)
        if not (delta.text or scored or delta.reasoning or delta.tool_calls):
            return b""
        if not frame:
            self._frames[event.index] = self._frame(event.index)
        return self._event([self._api.delta(delta)], None)

    def _choice_delta(self, event: AnswerDelta, *, first: bool) -> ChoiceDelta:
        index = event.index
        text = (self._opening(index) if first else "") + event.text
        scores = self._scores_of(event) or None
        prompt = event.prompt_logprobs if first and self._call.prompt_scored else None
        offset = self._offsets[index]
        self._offsets[index] += sum(len(each.chosen.text) for each in scores or ())
        parts = event.reasoning, event.tool_calls
        return ChoiceDelta(index, text, None, first, scores, offset, *parts, prompt)

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """What surrounds the text of a chunk with text alone, as most are: the same each time."""
        delta = ChoiceDelta(index, _PLACEHOLDER, None, first=False)
        chunk = self._event([self._api.delta(delta)], None)
        before, _, behind = chunk.partition(encode_basestring(_PLACEHOLDER).encode())
        return before, behind

    def _scores_of(self, delta: AnswerDelta) -> tuple[ScoredToken, ...]:
        """Those of its text, after the prompt's where it is echoed."""
        if not (delta.prompt_logprobs and self._call.echo and self._call.scored):
            return delta.logprobs
        # The prompt's tokens end where its text does, whatever precedes it.
        length = sum(len(each.chosen.text) for each in delta.prompt_logprobs)
        self._offsets[delta.index] = len(self._opening(delta.index)) - length
        return delta.prompt_logprobs + delta.logprobs

    def ending(self) -> bytes:
        """The last bytes of a stream."""
        if not self._call.include_usage:
            return DONE
        return self._event([], self._usage()) + DONE

    def _count(self, event: AnswerEvent) -> None:
        if isinstance(event, Started):
            self._prompt_tokens += event.prompt_tokens
        elif isinstance(event, Finished):
            self._completion_tokens += event.completion_tokens
            if event.index % self._call.n == 0:
                self._cached_tokens += event.cached_tokens

    def _usage(self) -> TokenUsage:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    def _opening(self, index: int) -> str:
        return self._openings[index // self._call.n]

    def _event(self, choices: Sequence[object], usage: TokenUsage | None) -> bytes:
        tail = b',"usage":' + encode(usage) if self._call.include_usage else b""
        return self._chunk_head + encode(choices) + tail + b"}\n\n"


def server_sent(content: Mapping[str, object], name: str) -> bytes:
    """One named server-sent event."""
    return f"event: {name}\ndata: ".encode() + encode(content) + b"\n\n"


def encode(content: object) -> bytes:
    return _ENCODER.encode(content).encode()

"""Renders chats and completions: answers are choices of one object, or of server-sent chunks."""

from __future__ import annotations

import codecs
import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import ClassVar, TypeVar

from baton.core.types import Request
from baton.router.answers.answer_events import (
    AnswerDelta,
    AnswerEvent,
    ScoredToken,
    TokenScore,
    ToolCallDelta,
    merge_deltas,
)
from baton.router.edges.http.answer_renderer import AnswerRenderer, encode
from baton.router.edges.http.answer_types import (
    AssistantDelta,
    AssistantMessage,
    CalledFunctionObject,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChosenLogprob,
    CompletionChoice,
    CompletionLogprobs,
    FinishName,
    LogprobObject,
    RankedLogprob,
    ReturnedTokens,
    TokenUsage,
    ToolCallChunk,
    ToolCallObject,
)
from baton.router.edges.http.chat_request import ChatRequest
from baton.router.edges.http.completion_request import ChoicesRequest, CompletionRequest
from baton.router.requests.serving import Serving
from baton.v1 import inference_pb2 as pb

FINISH: dict[int, FinishName] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
DONE = b"data: [DONE]\n\n"
_PLACEHOLDER = "\0text\0"

Body = TypeVar("Body", bound=ChoicesRequest)


class ChoiceRenderer(AnswerRenderer[Body]):
    answer_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, body: Body, requests: Sequence[Request]) -> None:
        super().__init__(body, requests)
        # Answer index: the bytes around the text of its chunks after the first.
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._deltas: defaultdict[int, list[AnswerDelta]] = defaultdict(list)
        self._finishes: dict[int, FinishName] = {}
        self._offsets: defaultdict[int, _TextOffsets] = defaultdict(_TextOffsets)  # by answer
        self._head: dict[str, object] = {
            "id": self.id,
            "object": self.chunk_object if body.stream else self.answer_object,
            "created": self.created,
            "model": self.model,
        }
        self._chunk_head = b"data: " + encode(self._head)[:-1] + b',"choices":'

    def _choice(self, delta: AnswerDelta, finish: FinishName) -> ChatChoice | CompletionChoice:
        """Renders the choice of a whole answer."""
        raise NotImplementedError

    def _chunk_choice(
        self, delta: AnswerDelta, finish: FinishName | None, *, first: bool
    ) -> ChatChunkChoice | CompletionChoice:
        raise NotImplementedError

    def _with_prefix(self, delta: AnswerDelta) -> AnswerDelta:
        """Adds what precedes an answer to its first delta."""
        return delta

    def _token_ids(self, delta: AnswerDelta) -> ReturnedTokens:
        return {"token_ids": delta.token_ids} if self._body.return_token_ids else {}

    def collect(self, event: AnswerEvent) -> None:
        self._count(event)
        if isinstance(event, AnswerDelta):
            self._deltas[event.index].append(event)
        elif isinstance(event, pb.Finished):
            self._finishes[event.index] = FINISH[event.finish_reason]

    def whole(self) -> bytes:
        choices = [
            self._choice(
                self._with_prefix(merge_deltas(self._deltas[index], index)), self._finishes[index]
            )
            for index in range(self.answers)
        ]
        return encode({**self._head, "choices": choices, "usage": self._usage()})

    def chunk(self, event: AnswerEvent) -> bytes:
        if isinstance(event, AnswerDelta):
            return self._delta(event)
        self._count(event)
        if isinstance(event, pb.Started):
            return b""
        first = event.index not in self._frames
        last = AnswerDelta("", [], event.index)
        delta = self._with_prefix(last) if first else last
        return self._event([self._chunk_choice(delta, FINISH[event.finish_reason], first=first)])

    def _delta(self, delta: AnswerDelta) -> bytes:
        frame = self._frames.get(delta.index)
        shown_ids = delta.token_ids if self._body.return_token_ids else ()
        scored = delta.logprobs or delta.prompt_logprobs or shown_ids
        if frame and not (scored or delta.reasoning or delta.tool_calls):
            before, behind = frame
            text = delta.text
            return before + encode_basestring(text).encode() + behind if text else b""
        if not frame:
            delta = self._with_prefix(delta)
            if not (delta.text or scored or delta.reasoning or delta.tool_calls):
                return b""
            self._frames[delta.index] = self._frame(delta.index)
        return self._event([self._chunk_choice(delta, None, first=not frame)])

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """The constant bytes around the text of a chunk that has only text, as most have."""
        delta = AnswerDelta(_PLACEHOLDER, [], index)
        chunk = self._event([self._chunk_choice(delta, None, first=False)])
        before, _, behind = chunk.partition(encode_basestring(_PLACEHOLDER).encode())
        return before, behind

    def ending(self) -> bytes:
        return self._event([], self._usage()) + DONE if self._body.include_usage else DONE

    def _usage(self) -> TokenUsage:
        usage: TokenUsage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.accepted_tokens or self.rejected_tokens:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.rejected_tokens,
            }
        if cache := self.response_cache:
            usage["response_cache"] = cache
        return usage

    def _event(self, choices: Sequence[object], usage: TokenUsage | None = None) -> bytes:
        tail = b',"usage":' + encode(usage) if self._body.include_usage else b""
        return self._chunk_head + encode(choices) + tail + b"}\n\n"


class ChatRenderer(ChoiceRenderer[ChatRequest]):
    body_model = ChatRequest
    prompt_field = "messages"
    id_prefix = "chatcmpl-"
    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _choice(self, delta: AnswerDelta, finish: FinishName) -> ChatChoice:
        message: AssistantMessage = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            message["content"] = delta.text or None
            message["tool_calls"] = [*map(_whole_call, delta.tool_calls)]
        return {
            "index": delta.index,
            "message": message,
            "logprobs": _chat_logprobs(delta.logprobs),
            "finish_reason": finish,
            **self._token_ids(delta),
        }

    def _chunk_choice(
        self, delta: AnswerDelta, finish: FinishName | None, *, first: bool
    ) -> ChatChunkChoice:
        content: AssistantDelta = {}
        if first:
            silent = delta.reasoning or delta.tool_calls
            content = {"role": "assistant", "content": None if silent else ""}
        if delta.text:
            content["content"] = delta.text
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            content["tool_calls"] = [*map(_call_chunk, delta.tool_calls)]
        return {
            "index": delta.index,
            "delta": content,
            "logprobs": _chat_logprobs(delta.logprobs),
            "finish_reason": finish,
            **self._token_ids(delta),
        }


class CompletionRenderer(ChoiceRenderer[CompletionRequest]):
    body_model = CompletionRequest
    prompt_field = "prompt"
    id_prefix = "cmpl-"
    answer_object = chunk_object = "text_completion"
    echoes: Sequence[str] = ()  # the prompts' texts, if answers begin with them

    async def prepare(self, serving: Serving) -> None:
        if self._body.echo:
            self.echoes = [
                each if isinstance(each, str) else await serving.decode(each, keep_special=True)
                for each in self._body.prompt
            ]

    def _with_prefix(self, delta: AnswerDelta) -> AnswerDelta:
        if not self.echoes:
            return delta
        echo = self.echoes[delta.index // self._body.n]
        count = self._body.logprobs
        scores = () if count is None else tuple(each.first(count) for each in delta.prompt_logprobs)
        # The prompt's tokens end where its text ends. The start is below 0 if the first token is
        # not part of the text.
        given = b"".join(each.chosen.data for each in scores).decode(errors="replace")
        self._offsets[delta.index] = _TextOffsets(len(echo) - len(given))
        return dataclasses.replace(
            delta, text=echo + delta.text, logprobs=(*scores, *delta.logprobs)
        )

    def _choice(self, delta: AnswerDelta, finish: FinishName | None) -> CompletionChoice:
        choice: CompletionChoice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.index, delta.logprobs) if delta.logprobs else None,
            "finish_reason": finish,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if delta.prompt_logprobs and (count := self._body.prompt_logprobs) is not None:
            shown = (each.first(count) for each in delta.prompt_logprobs)
            choice["prompt_logprobs"] = [*map(_by_id, shown)]
        return choice

    def _chunk_choice(
        self, delta: AnswerDelta, finish: FinishName | None, *, first: bool
    ) -> CompletionChoice:
        return self._choice(delta, finish)

    def _logprobs(self, index: int, scores: Sequence[ScoredToken]) -> CompletionLogprobs:
        offsets = self._offsets[index]
        return {
            "tokens": [each.chosen.text for each in scores],
            "token_logprobs": [each.chosen.logprob for each in scores],
            "top_logprobs": [*map(_by_text, scores)],
            "text_offset": [offsets.push(each.chosen.data) for each in scores],
        }


class _TextOffsets:
    """Offsets of a text's tokens in characters. A token that begins within a character has that
    character's offset."""

    def __init__(self, start: int = 0) -> None:
        self._next = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: bytes) -> int:
        begin = max(0, self._next)
        self._next += len(self._decoder.decode(token))
        return begin


def _whole_call(call: ToolCallDelta) -> ToolCallObject:
    function: CalledFunctionObject = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_chunk(delta: ToolCallDelta) -> ToolCallChunk:
    if not delta.name:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    return {
        "index": delta.index,
        "id": delta.id,
        "type": "function",
        "function": {"name": delta.name, "arguments": delta.arguments},
    }


def _chat_logprobs(scores: Sequence[ScoredToken]) -> ChatLogprobs | None:
    content: list[ChosenLogprob] = [
        {**_logprob(each.chosen), "top_logprobs": [*map(_logprob, each.top)]} for each in scores
    ]
    return {"content": content, "refusal": None} if content else None


def _logprob(score: TokenScore) -> LogprobObject:
    return {"token": score.text, "logprob": score.logprob, "bytes": list(score.data)}


def _by_text(scored: ScoredToken) -> dict[str, float | None] | None:
    """Scores of the top tokens and the chosen one by text; the likeliest of those with one text."""
    if scored.chosen.logprob is None:
        return None
    by_text: dict[str, float | None] = {}
    for score in (*scored.top, scored.chosen):
        by_text.setdefault(score.text, score.logprob)
    return by_text


def _by_id(scored: ScoredToken) -> dict[str, RankedLogprob] | None:
    """Scores of a prompt token by token id, in vLLM's format; None for the first token."""
    if scored.chosen.logprob is None:
        return None
    by_id: dict[str, RankedLogprob] = {}
    for place, score in enumerate((*scored.top, scored.chosen)):
        rank = place + 1 if place < len(scored.top) else None
        by_id.setdefault(
            str(score.token_id),
            {"logprob": score.logprob, "rank": rank, "decoded_token": score.text},
        )
    return by_id

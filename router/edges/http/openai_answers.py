"""Answers in the OpenAI API's shapes: their types, which /openapi.json is made from, and how the
choices of chats and completions are built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NotRequired, Protocol

from typing_extensions import TypedDict

from baton.core.proto_json import Json
from baton.router.answers.answer_events import ScoredToken, TokenScore, ToolCallDelta
from baton.router.edges.http.chat_request import ChatRequest
from baton.router.edges.http.generation_request import CompletionRequest, ParsedCall

FinishName = Literal["stop", "length", "tool_calls"]


class CalledFunctionObject(TypedDict):
    name: str
    arguments: str


class ToolCallObject(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunctionObject


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallChunk(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class LogprobObject(TypedDict):
    token: str
    logprob: float | None
    bytes: list[int]


class ChosenLogprob(LogprobObject):
    top_logprobs: list[LogprobObject]


class ChatLogprobs(TypedDict):
    content: list[ChosenLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class RankedLogprob(TypedDict):
    logprob: float | None
    rank: int | None
    decoded_token: str


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallObject]]


class AssistantDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallChunk]]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishName


class ChatChunkChoice(TypedDict):
    index: int
    delta: AssistantDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishName | None


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName | None
    prompt_logprobs: NotRequired[list[dict[str, RankedLogprob] | None]]


class CachedTokens(TypedDict):
    cached_tokens: int


class TokenUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class AnswerHead(TypedDict):
    id: str
    created: int
    model: str


class ChatAnswer(AnswerHead):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage


class ChatChunk(AnswerHead):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[TokenUsage | None]


class CompletionAnswer(AnswerHead):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[TokenUsage | None]


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one emission adds to one answer; or all of it."""

    index: int
    text: str
    finish: FinishName | None
    # Nothing of the answer was emitted before.
    first: bool = True
    # One a token, an echoed prompt's included; None where not asked for.
    scores: Sequence[ScoredToken] | None = None
    # Characters of the tokens emitted before.
    offset: int = 0
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()
    # The prompt's, apart; None where not asked for, or emitted before.
    prompt_scores: Sequence[ScoredToken] | None = None


class OpenAiApi(Protocol):
    """How one endpoint parses its calls and shapes its answers."""

    prompt_field: str
    id_prefix: str
    answer_object: str
    chunk_object: str

    def parse(self, body: Json, request_id: str, salt: Callable[[str], str]) -> ParsedCall: ...

    def choice(self, answer: ChoiceDelta) -> ChatChoice | CompletionChoice:
        """Of a whole answer."""

    def delta(self, delta: ChoiceDelta) -> ChatChunkChoice | CompletionChoice: ...


class ChatApi:
    prompt_field = "messages"
    id_prefix = "chatcmpl-"
    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def parse(self, body: Json, request_id: str, salt: Callable[[str], str]) -> ParsedCall:
        return ChatRequest.parse(body).call(request_id, salt)

    def choice(self, answer: ChoiceDelta) -> ChatChoice:
        message: AssistantMessage = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["content"] = answer.text or None
            message["tool_calls"] = _whole_calls(answer.tool_calls)
        assert answer.finish
        return {
            "index": answer.index,
            "message": message,
            "logprobs": _chat_logprobs(answer.scores),
            "finish_reason": answer.finish,
        }

    def delta(self, delta: ChoiceDelta) -> ChatChunkChoice:
        content: AssistantDelta = {}
        if delta.first:
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
            "logprobs": _chat_logprobs(delta.scores),
            "finish_reason": delta.finish,
        }


class CompletionsApi:
    prompt_field = "prompt"
    id_prefix = "cmpl-"
    answer_object = chunk_object = "text_completion"

    def parse(self, body: Json, request_id: str, salt: Callable[[str], str]) -> ParsedCall:
        return CompletionRequest.parse(body).call(request_id, salt)

    def choice(self, answer: ChoiceDelta) -> CompletionChoice:
        return self.delta(answer)

    def delta(self, delta: ChoiceDelta) -> CompletionChoice:
        choice: CompletionChoice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": _completion_logprobs(delta.scores, delta.offset),
            "finish_reason": delta.finish,
        }
        if delta.prompt_scores is not None:
            choice["prompt_logprobs"] = [_by_id(each) for each in delta.prompt_scores]
        return choice


def _whole_calls(deltas: Iterable[ToolCallDelta]) -> list[ToolCallObject]:
    calls: list[ToolCallObject] = []
    for delta in deltas:
        if delta.name:
            function: CalledFunctionObject = {"name": delta.name, "arguments": ""}
            calls.append({"id": delta.id, "type": "function", "function": function})
        calls[-1]["function"]["arguments"] += delta.arguments
    return calls


def _call_chunk(delta: ToolCallDelta) -> ToolCallChunk:
    if not delta.name:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    return {
        "index": delta.index,
        "id": delta.id,
        "type": "function",
        "function": {"name": delta.name, "arguments": delta.arguments},
    }


def _chat_logprobs(scores: Sequence[ScoredToken] | None) -> ChatLogprobs | None:
    if scores is None:
        return None
    content: list[ChosenLogprob] = [
        {**_logprob(each.chosen), "top_logprobs": [*map(_logprob, each.top)]} for each in scores
    ]
    return {"content": content, "refusal": None}


def _logprob(score: TokenScore) -> LogprobObject:
    return {"token": score.text, "logprob": score.logprob, "bytes": list(score.data)}


def _completion_logprobs(
    scores: Sequence[ScoredToken] | None, offset: int
) -> CompletionLogprobs | None:
    """`offset` is where the first token's text begins: below 0 where a prompt's first token is no
    part of its text."""
    if scores is None:
        return None
    lengths = (len(each.chosen.text) for each in scores)
    return {
        "tokens": [each.chosen.text for each in scores],
        "token_logprobs": [each.chosen.logprob for each in scores],
        "top_logprobs": [_by_text(each) for each in scores],
        "text_offset": [max(0, each) for each in accumulate(lengths, initial=offset)][:-1],
    }


def _by_text(scored: ScoredToken) -> dict[str, float | None] | None:
    """The likeliest tokens and the chosen one; of tokens with the same text, the likeliest."""
    if scored.chosen.logprob is None:
        return None
    by_text: dict[str, float | None] = {}
    for score in (*scored.top, scored.chosen):
        by_text.setdefault(score.text, score.logprob)
    return by_text


def _by_id(scored: ScoredToken) -> dict[str, RankedLogprob] | None:
    """By token id, as vLLM returns a prompt's; None for the first token."""
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

"""The values of an answer, and the builder that makes them from a stream of messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import chain

from baton.core.errors import Internal
from baton.core.types import FinishReason, ToolCall
from baton.v1 import inference_pb2, timing_pb2

Metadata = Iterable[tuple[str, str | bytes]]

_TIMING_KEY = "baton-timing-bin"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    text: bytes  # may end within a character
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token of an answer or a prompt, and the likeliest in its place, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one message adds to an answer. The text may lag behind the token ids."""

    text: str
    token_ids: tuple[int, ...]
    index: int = 0  # of the answer, if there are several
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if requested
    reasoning: str = ""  # text of the model's reasoning
    tool_calls: tuple[inference_pb2.ToolCallDelta, ...] = ()
    # In an answer's first delta: one per prompt token except the first, if requested.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int  # of all answers together
    cached_tokens: int = 0  # prompt tokens that were not computed again
    fetched_tokens: int = 0  # cached tokens that were fetched from another worker
    # The server's right and wrong guesses (speculation) in all answers.
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    # For answers from the response cache: "exact" or "semantic", and their age in seconds.
    response_cache: str = ""
    response_age: float = 0.0
    response_similarity: float = 0.0  # of the two questions, if they differ


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of one attempt at an answer."""

    prefill_worker: str  # empty for local prefill
    decode_worker: str  # empty if the first token was the last
    policy: str  # "split", "local" or "prefill"
    reason: str  # why these; after a retry, what ended the last attempt
    reason_code: str = ""  # its stable name, such as "cached"
    predicted_seconds: float = 0.0  # from placement to the first token


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several answers to a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str  # the stop string that ended the answer, if one did
    seed: int  # a request with this seed and n=1 has this answer
    placements: tuple[Placement, ...]  # one per attempt
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if requested
    reasoning: str = ""  # text of the model's reasoning
    tool_calls: tuple[ToolCall, ...] = ()  # requested by the model
    # One per prompt token except the first, if requested.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, the first if there are several. `choices` has all, in order."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str  # the stop string that ended the answer, if one did
    usage: Usage
    request_id: str
    model: str
    seed: int  # the caller's, or one drawn at random
    prefill_worker: str
    decode_worker: str  # empty if the first token was the last
    placements: tuple[Placement, ...]  # one per attempt
    choices: tuple[Choice, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if requested
    reasoning: str = ""  # text of the model's reasoning
    tool_calls: tuple[ToolCall, ...] = ()  # requested by the model
    # One per prompt token except the first, if requested.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class AnswerBuilder:
    """Folds the messages of one Generate call, in order, into an Answer."""

    def __init__(self) -> None:
        self.started: inference_pb2.Started | None = None  # the latest, if the stream was resumed
        self._deltas: defaultdict[int, list[Delta]] = defaultdict(list)
        self._finished: dict[int, inference_pb2.Finished] = {}

    def add(self, response: inference_pb2.GenerateResponse) -> Delta | None:
        """Adds the next message; returns its Delta if it is one."""
        match response.WhichOneof("event"):
            case "started":
                self.started = response.started
            case "delta":
                delta = _delta(response.delta)
                self._deltas[delta.index].append(delta)
                return delta
            case "finished":
                self._finished[response.finished.index] = response.finished
        return None

    @property
    def complete(self) -> bool:
        return self.started is not None and 0 < self.started.n == len(self._finished)

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the first answer so far."""
        return [token for delta in self._deltas[0] for token in delta.token_ids]

    def answer(self) -> Answer:
        """The answer, once the stream has ended."""
        started = self.started
        if started is None or not self.complete:
            raise Internal("the router closed the stream before the end of the answer")
        choices = [
            _choice(index, self._deltas[index], self._finished[index]) for index in range(started.n)
        ]
        first = {name: getattr(choices[0], name) for name in _SHARED_FIELDS}
        usage = self._finished[0].usage
        completion = sum(each.usage.completion_tokens for each in self._finished.values())
        return Answer(
            usage=Usage(
                started.prompt_tokens,
                completion,
                usage.cached_tokens,
                usage.fetched_tokens,
                sum(each.usage.accepted_prediction_tokens for each in self._finished.values()),
                sum(each.usage.rejected_prediction_tokens for each in self._finished.values()),
                usage.response_cache.kind,
                usage.response_cache.age_seconds,
                usage.response_cache.similarity,
            ),
            request_id=started.request_id,
            model=started.model,
            seed=started.seed,
            prefill_worker=started.prefill_worker,
            decode_worker=started.decode_worker,
            choices=tuple(choices),
            **first,
        )


_SHARED_FIELDS = {field.name for field in fields(Choice)} - {"index", "seed"}
"""Fields of an Answer that are its first choice's."""


def _delta(message: inference_pb2.Delta) -> Delta:
    return Delta(
        message.text,
        tuple(message.token_ids),
        message.index,
        tuple(_logprobs(each) for each in message.logprobs),
        message.reasoning,
        tuple(message.tool_calls),
        tuple(_logprobs(each) for each in message.prompt_logprobs),
    )


def _choice(index: int, deltas: list[Delta], finished: inference_pb2.Finished) -> Choice:
    return Choice(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        finish_reason=FinishReason(finished.finish_reason),
        stop=finished.stop,
        seed=finished.seed,
        placements=tuple(_placement(item) for item in finished.placements),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=_joined(chain.from_iterable(delta.tool_calls for delta in deltas)),
        prompt_logprobs=tuple(chain.from_iterable(each.prompt_logprobs for each in deltas)),
    )


def _joined(calls: Iterable[inference_pb2.ToolCallDelta]) -> tuple[ToolCall, ...]:
    """A delta with a name starts a call; those without continue its arguments."""
    joined: list[ToolCall] = []
    for call in calls:
        if call.name:
            joined.append(ToolCall(call.id, call.name, call.arguments))
        else:
            joined[-1] = replace(joined[-1], arguments=joined[-1].arguments + call.arguments)
    return tuple(joined)


def _logprobs(item: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(_logprob(item.chosen), tuple(_logprob(each) for each in item.top))


def _logprob(item: inference_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(item.token_id, item.text, item.logprob)


def _placement(item: inference_pb2.Placement) -> Placement:
    return Placement(*(getattr(item, field.name) for field in fields(Placement)))


def timing_of(trailer: Metadata) -> timing_pb2.RequestTiming:
    """Unpacks the timing in a call's trailer (router/observe/time_breakdown.py packs it)."""
    for key, value in trailer:
        if key == _TIMING_KEY and isinstance(value, bytes):
            return timing_pb2.RequestTiming.FromString(value)
    raise Internal("the call did not end with its timing")

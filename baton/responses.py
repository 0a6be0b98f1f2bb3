"""What comes back: the values of an answer, and how a stream folds into them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from baton.core.errors import Internal
from baton.core.types import FinishReason, ToolCall
from baton.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    text: bytes  # what it stands for; maybe half a character
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token of an answer or a prompt, and the likeliest ones in its place, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of an answer. The text may lag behind the token ids."""

    text: str
    token_ids: tuple[int, ...]
    index: int = 0  # the answer that it belongs to, where there are several
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, where they are asked for
    reasoning: str = ""  # what is thought, not said
    tool_calls: tuple[inference_pb2.ToolCallDelta, ...] = ()
    # With an answer's first: one a token of the prompt but the first, where they are asked for.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a request took."""

    prompt_tokens: int
    completion_tokens: int  # of all answers together
    cached_tokens: int = 0  # of the prompt's, those that were not computed again
    fetched_tokens: int = 0  # of the cached, those that one worker fetched from another


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one attempt at an answer was made."""

    prefill_worker: str  # empty when the decode worker read the prompt itself
    decode_worker: str  # empty when the first token was known to be the last
    policy: str  # "split", "local" or "prefill"
    reason: str  # why there; after the first attempt, what ended the one before
    reason_code: str = ""  # its stable name, such as "cached"
    predicted_seconds: float = 0.0  # from there to the first token


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several answers to the same request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str  # the stop string that ended the answer, where one did
    seed: int  # alone, with this seed, the request has this answer
    placements: tuple[Placement, ...]  # one an attempt: more than one when a worker was lost
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, where they are asked for
    reasoning: str = ""  # what was thought, not said
    tool_calls: tuple[ToolCall, ...] = ()  # what is to be called
    # One a token of the prompt but the first, where they are asked for.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, and how it came about. Where there are several, the first; `choices` has
    them all, in order."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str  # the stop string that ended the answer, where one did
    usage: Usage
    request_id: str
    model: str
    seed: int  # the caller's, or the one that was drawn
    prefill_worker: str
    decode_worker: str  # empty when the first token was known to be the last
    placements: tuple[Placement, ...]  # one an attempt: more than one when a worker was lost
    choices: tuple[Choice, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, where they are asked for
    reasoning: str = ""  # what was thought, not said
    tool_calls: tuple[ToolCall, ...] = ()  # what is to be called
    # One a token of the prompt but the first, where they are asked for.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class AnswerBuilder:
    """Folds the messages of one Generate call, in order, into an Answer."""

    def __init__(self) -> None:
        self._started = inference_pb2.Started()
        self._choices: defaultdict[int, _ChoiceBuilder] = defaultdict(_ChoiceBuilder)
        self._finished = 0

    @property
    def complete(self) -> bool:
        return 0 < self._started.n == self._finished

    def add(self, response: inference_pb2.GenerateResponse) -> Delta | None:
        """Takes the next message, and gives its Delta where it is one."""
        match response.WhichOneof("event"):
            case "started":
                self._started = response.started
            case "delta":
                return self._choices[response.delta.index].add(response.delta)
            case "finished":
                self._finished += 1
                self._choices[response.finished.index].finished = response.finished
        return None

    def answer(self) -> Answer:
        """The answer, once the last message is in."""
        if not self.complete:
            raise Internal("the router closed the stream before the end of the answer")
        started = self._started
        choices = [self._choices[index].choice(index) for index in range(started.n)]
        first = choices[0]
        return Answer(
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            stop=first.stop,
            usage=self._usage(),
            request_id=started.request_id,
            model=started.model,
            seed=started.seed,
            prefill_worker=started.prefill_worker,
            decode_worker=started.decode_worker,
            placements=first.placements,
            choices=tuple(choices),
            logprobs=first.logprobs,
            reasoning=first.reasoning,
            tool_calls=first.tool_calls,
            prompt_logprobs=first.prompt_logprobs,
        )

    def _usage(self) -> Usage:
        counts = [choice.finished.usage.completion_tokens for choice in self._choices.values()]
        first = self._choices[0].finished.usage
        prompt, answers = self._started.prompt_tokens, sum(counts)
        return Usage(prompt, answers, first.cached_tokens, first.fetched_tokens)


class _ChoiceBuilder:
    """One answer, as its messages come."""

    def __init__(self) -> None:
        self.finished = inference_pb2.Finished()
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def add(self, delta: inference_pb2.Delta) -> Delta:
        self._texts.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        logprobs = tuple(_logprobs(each) for each in delta.logprobs)
        self._logprobs.extend(logprobs)
        self._thoughts.append(delta.reasoning)
        for piece in delta.tool_calls:
            self._call(piece)
        prompt_logprobs = tuple(_logprobs(each) for each in delta.prompt_logprobs)
        self._prompt_logprobs += prompt_logprobs
        return Delta(
            delta.text,
            tuple(delta.token_ids),
            delta.index,
            logprobs,
            delta.reasoning,
            tuple(delta.tool_calls),
            prompt_logprobs,
        )

    def _call(self, piece: inference_pb2.ToolCallDelta) -> None:
        if piece.name:
            self._calls.append(ToolCall(piece.id, piece.name, piece.arguments))
        else:
            last = self._calls[-1]
            self._calls[-1] = ToolCall(last.id, last.name, last.arguments + piece.arguments)

    def choice(self, index: int) -> Choice:
        return Choice(
            index=index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=FinishReason(self.finished.finish_reason),
            stop=self.finished.stop,
            seed=self.finished.seed,
            placements=tuple(_placement(item) for item in self.finished.placements),
            logprobs=tuple(self._logprobs),
            reasoning="".join(self._thoughts),
            tool_calls=tuple(self._calls),
            prompt_logprobs=self._prompt_logprobs,
        )


def _logprobs(item: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(_logprob(item.chosen), tuple(_logprob(each) for each in item.top))


def _logprob(item: inference_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(item.token_id, item.text, item.logprob)


def _placement(item: inference_pb2.Placement) -> Placement:
    return Placement(
        item.prefill_worker,
        item.decode_worker,
        item.policy,
        item.reason,
        item.reason_code,
        item.predicted_seconds,
    )

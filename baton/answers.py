"""What comes back: the values of an answer, and how a stream folds into them."""

from __future__ import annotations

from dataclasses import dataclass

from baton.v1 import inference_pb2
from core.errors import Internal
from core.types import FinishReason


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of an answer. The text may lag behind the token ids."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a request took."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one attempt at an answer was made."""

    prefill_worker: str  # empty when the decode worker read the prompt itself
    decode_worker: str  # empty when the first token was known to be the last
    policy: str  # "split", "local" or "prefill"
    reason: str  # why there; after the first attempt, what ended the one before


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, and how it came about."""

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


class AnswerBuilder:
    """Folds the messages of one Generate call, in order, into an Answer."""

    def __init__(self) -> None:
        self._started = inference_pb2.Started()
        self._finished: inference_pb2.Finished | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    @property
    def complete(self) -> bool:
        return self._finished is not None

    def add(self, response: inference_pb2.GenerateResponse) -> Delta | None:
        """Takes the next message, and gives its Delta where it is one."""
        match response.WhichOneof("event"):
            case "started":
                self._started = response.started
            case "delta":
                return self._add_delta(response.delta)
            case "finished":
                self._finished = response.finished
        return None

    def _add_delta(self, delta: inference_pb2.Delta) -> Delta:
        self._texts.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        return Delta(delta.text, tuple(delta.token_ids))

    def answer(self) -> Answer:
        """The answer, once the last message is in."""
        if self._finished is None:
            raise Internal("the router closed the stream before the end of the answer")
        started, finished = self._started, self._finished
        return Answer(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=FinishReason(finished.finish_reason),
            stop=finished.stop,
            usage=Usage(finished.usage.prompt_tokens, finished.usage.completion_tokens),
            request_id=started.request_id,
            model=started.model,
            seed=started.seed,
            prefill_worker=started.prefill_worker,
            decode_worker=started.decode_worker,
            placements=tuple(
                Placement(item.prefill_worker, item.decode_worker, item.policy, item.reason)
                for item in finished.placements
            ),
        )

"""Events that a request emits to its edge (gRPC or HTTP)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import numpy
from numpy.typing import NDArray

from baton.core.errors import InvalidRequest, Unavailable
from baton.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class TokenScore:
    token_id: int
    data: bytes  # the token's text in UTF-8, possibly part of a character
    logprob: float | None  # None for a prompt's first token

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer or a prompt, with the likeliest tokens at its position, best first."""

    chosen: TokenScore
    top: tuple[TokenScore, ...]

    def first(self, count: int) -> ScoredToken:
        """The same with the `count` likeliest tokens at most."""
        return ScoredToken(self.chosen, self.top[:count])


@dataclass(slots=True)
class ToolCallDelta:
    """Part of a tool call: its id and name first, then its arguments as they come."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)  # made for every token: freezing it would double the cost
class AnswerDelta:
    text: str
    token_ids: list[int]
    index: int = 0
    # One per token, if requested.
    logprobs: tuple[ScoredToken, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    # With an answer's first delta: one per token of the prompt, if requested.
    prompt_logprobs: tuple[ScoredToken, ...] = ()
    # A whole answer from the response cache: no client is too slow for it.
    replayed: bool = False
    # With an answer's first delta: the prompt's embedding, if requested.
    embedding: bytes = b""

    def add(self, later: AnswerDelta) -> None:
        """Appends the same answer's next delta."""
        self.text += later.text
        self.token_ids = self.token_ids + later.token_ids  # others hold the first list
        self.logprobs += later.logprobs
        self.reasoning += later.reasoning
        if later.tool_calls:
            self.tool_calls = _joined(self.tool_calls + later.tool_calls)
        self.prompt_logprobs += later.prompt_logprobs
        self.embedding += later.embedding


def merge_deltas(deltas: Sequence[AnswerDelta], index: int) -> AnswerDelta:
    """Merges consecutive deltas of one answer."""
    return AnswerDelta(
        "".join(each.text for each in deltas),
        list(chain.from_iterable(each.token_ids for each in deltas)),
        index,
        tuple(chain.from_iterable(each.logprobs for each in deltas)),
        "".join(each.reasoning for each in deltas),
        _joined(chain.from_iterable(each.tool_calls for each in deltas)),
        tuple(chain.from_iterable(each.prompt_logprobs for each in deltas)),
    )


def _joined(calls: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Merges to one delta per call: clients read only a call's first entry in a chunk."""
    runs = (list(run) for _, run in groupby(calls, key=lambda call: call.index))
    return tuple(
        ToolCallDelta(run[0].index, run[0].id, run[0].name, "".join(each.arguments for each in run))
        for run in runs
    )


AnswerEvent = pb.Started | AnswerDelta | pb.Finished
Emit = Callable[[AnswerEvent], None]

Vector = NDArray[numpy.float32]


class EmbeddedInputs:
    """Collects the vectors of a call's inputs from the events of their answers."""

    def __init__(self, inputs: int, dimensions: int | None, *, normalized: bool) -> None:
        """Vectors are cut to their first `dimensions`; None keeps all."""
        self._inputs = inputs
        self._dimensions = dimensions
        self._normalized = normalized
        self._found: dict[int, Vector] = {}
        self.prompt_tokens = 0  # of all inputs

    def collect(self, event: AnswerEvent) -> None:
        if isinstance(event, pb.Started):
            self.prompt_tokens += event.prompt_tokens
        elif isinstance(event, AnswerDelta) and event.embedding:
            self._found[event.index] = numpy.frombuffer(event.embedding, "<f4")

    def vectors(self) -> list[Vector]:
        """Returns one vector per input, in order."""
        if len(self._found) < self._inputs:
            raise Unavailable("a worker of another version returned no embedding")
        return [self._shape(self._found[index]) for index in range(self._inputs)]

    def _shape(self, vector: Vector) -> Vector:
        size = self._dimensions
        if size is not None and not 1 <= size <= len(vector):
            raise InvalidRequest(
                f"dimensions must be 1 to {len(vector)}, not {size}", field="dimensions"
            )
        cut = vector[:size]
        length = numpy.linalg.norm(cut) if self._normalized else 0.0
        return cut / length if length else cut

"""What a request emits to its edge (gRPC or HTTP) while it is served."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

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
    """A token of an answer or a prompt, and the likeliest tokens at its position, best first."""

    chosen: TokenScore
    top: tuple[TokenScore, ...]


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
    # One per token, where requested.
    logprobs: tuple[ScoredToken, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    # With an answer's first delta: one per token of the prompt, where requested.
    prompt_logprobs: tuple[ScoredToken, ...] = ()
    # All of an answer from the response cache: no client can be too slow for it.
    replayed: bool = False
    # With an answer's first delta: of the prompt, where requested.
    embedding: bytes = b""

    def add(self, later: AnswerDelta) -> None:
        """Appends what the same answer has emitted next."""
        self.text += later.text
        self.token_ids = self.token_ids + later.token_ids  # others hold the first list
        self.logprobs += later.logprobs
        self.reasoning += later.reasoning
        if later.tool_calls:
            self.tool_calls = _joined(self.tool_calls + later.tool_calls)
        self.prompt_logprobs += later.prompt_logprobs
        self.embedding += later.embedding


def merged(deltas: Sequence[AnswerDelta], index: int) -> AnswerDelta:
    """Consecutive deltas of one answer in one."""
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
    """One delta a call: clients take the first entry of a chunk for all of it."""
    runs = (list(run) for _, run in groupby(calls, key=lambda call: call.index))
    return tuple(
        ToolCallDelta(run[0].index, run[0].id, run[0].name, "".join(each.arguments for each in run))
        for run in runs
    )


AnswerEvent = pb.Started | AnswerDelta | pb.Finished
Emit = Callable[[AnswerEvent], None]

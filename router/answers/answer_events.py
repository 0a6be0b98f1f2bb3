"""What a request emits to its edge (gRPC or HTTP) while it is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.core.types import FinishReason
from baton.router.placement.placement import Placement


@dataclass(frozen=True, slots=True)
class TokenScore:
    token_id: int
    # What the token stands for: UTF-8, maybe half a character.
    data: bytes
    # None for a prompt's first token, which nothing stands before.
    logprob: float | None

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer or a prompt, and the likeliest in its place, best first."""

    chosen: TokenScore
    top: tuple[TokenScore, ...]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A call, as it comes: its id and name first, then pieces of its arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    request_id: str
    prompt_tokens: int
    prefill_worker: str
    decode_worker: str
    seed: int
    answers: int = 1


@dataclass(slots=True)  # one a token: to freeze it would take as long again as to make it
class AnswerDelta:
    text: str
    token_ids: list[int]
    index: int = 0
    # One a token, where they are asked for.
    logprobs: list[ScoredToken] = field(default_factory=list)
    # What is thought, and what is called, neither of which is said.
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    # With an answer's first: one a token of the prompt, where they are asked for.
    prompt_logprobs: list[ScoredToken] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    stop: str
    placements: tuple[Placement, ...] = ()
    index: int = 0
    seed: int = 0
    cached_tokens: int = 0
    fetched_tokens: int = 0


AnswerEvent = Started | AnswerDelta | Finished
Emit = Callable[[AnswerEvent], None]

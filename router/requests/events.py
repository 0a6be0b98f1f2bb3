"""What is told of a request while it is served, to whichever edge (gRPC, HTTP) it came by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.core.types import FinishReason
from baton.router.answers.logprobs import ScoredToken
from baton.router.answers.parts import ToolCallPiece
from baton.router.placement.placement import Placement


@dataclass(frozen=True, slots=True)
class Started:
    request_id: str
    prompt_tokens: int
    prefill_worker: str
    decode_worker: str
    seed: int
    answers: int = 1


@dataclass(slots=True)  # one a token: to freeze it would take as long again as to make it
class Delta:
    text: str
    token_ids: list[int]
    index: int = 0
    # One a token, where they are asked for.
    logprobs: list[ScoredToken] = field(default_factory=list)
    # What is thought, and what is called, neither of which is said.
    reasoning: str = ""
    tool_calls: list[ToolCallPiece] = field(default_factory=list)
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


Event = Started | Delta | Finished
Tell = Callable[[Event], None]

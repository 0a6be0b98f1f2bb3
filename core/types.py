"""The plain values that pass between parts."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

PROTOCOL = 4
"""Version of the router-worker protocol. Both ends must agree."""

MAX_MESSAGE_BYTES = 64 * 2**20
"""The largest gRPC message that any part sends or takes."""

SEED_STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of two answers to one request: odd, and far from what people choose, so
that neighbouring seeds share no answers."""


class Role(enum.StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(enum.Enum):
    """Why an answer ended. The values are those of baton.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    TOOL_CALLS = 3


class DeviceEvent(Protocol):
    """A point in a device's queue of work, as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether all work queued before it is done."""


class AttemptKey(NamedTuple):
    """One try at one request. A message of an older epoch matches nothing."""

    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How each next token is chosen. The defaults are greedy and change nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    # Token ids, each once, and what is added to their logits.
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def for_answer(self, index: int) -> Sampling:
        """How the tokens of one of several answers are chosen. Answer 0 is as if it were alone."""
        return replace(self, seed=(self.seed + index * SEED_STRIDE) % 2**64)


class Logprobs(NamedTuple):
    """How likely a token was, and the likeliest that could have stood in its place.

    Natural logarithms of the model's own probabilities: before temperature, penalties and biases.
    """

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """One attempt as workers see it: token ids and numbers, no text."""

    key: AttemptKey
    # The prompt and, after it, what earlier attempts have already answered.
    prompt_tokens: Sequence[int]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: frozenset[int]
    # How many of prompt_tokens, at their end, are answer.
    answer_tokens: int = 0
    # Cached pages are shared only among requests of the same salt.
    cache_salt: str = ""
    # How many of the likeliest tokens to tell with each token, and how likely
    # all of them were. None: nothing of it.
    logprobs: int | None = None
    # What the answer must read as, in llguidance's own words; empty: any text.
    grammar: str = ""
    # The same as logprobs, of the prompt's tokens from its second on.
    prompt_logprobs: int | None = None
    # Names of the prompt's full pages (core/page_keys.py), where a router has
    # made them. They do not travel.
    page_keys: Sequence[bytes] = ()

    @property
    def cache_name(self) -> str:
        """Pages are shared under this. A prompt whose tokens are to be scored shares none: what
        is cached of it would have no scores."""
        if self.prompt_logprobs is None:
            return self.cache_salt
        return f"{self.cache_salt}\n{self.key.request_id}\n{self.key.epoch}"

    @property
    def tokens_wanted(self) -> int:
        """The most tokens that are still to be generated."""
        return self.max_tokens - self.answer_tokens

    def finish_reason(self, token: int, generated: int) -> FinishReason | None:
        """Whether `token`, the `generated`-th of the answer, is its last."""
        if token in self.stop_token_ids:
            return FinishReason.STOP
        if generated >= self.max_tokens:
            return FinishReason.LENGTH
        return None


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # as JSON


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str
    # What the assistant called, in its own messages.
    tool_calls: tuple[ToolCall, ...] = ()
    # The call that a tool's message answers.
    tool_call_id: str = ""
    # Who speaks, beyond the role; a tool's name.
    name: str = ""
    # What the assistant thought, in its own messages.
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may ask its caller to call."""

    name: str
    description: str = ""
    parameters: str = "{}"  # a JSON Schema


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    # Whether a tool must be called, and which; empty: any of them.
    must_call: bool = False
    tool_name: str = ""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Structure:
    """What an answer must read as: a JSON Schema, a regular expression or a Lark grammar."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request, before its prompt is turned into tokens."""

    request_id: str
    prompt: Prompt
    sampling: Sampling
    max_tokens: int | None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    # How many answers are wanted.
    n: int = 1
    # How many of the likeliest tokens to tell with each token; None: no probabilities at all.
    logprobs: int | None = None
    # The same of the prompt's tokens, from its second on.
    prompt_logprobs: int | None = None
    # What every answer must read as; None: any text.
    structure: Structure | None = None
    # Cached pages are shared only among requests of the same salt.
    cache_salt: str = ""
    # When its caller stops waiting, on time.monotonic()'s clock.
    deadline: float = math.inf

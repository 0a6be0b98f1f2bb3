"""The plain values that pass between parts."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

PROTOCOL = 6
"""Version of the router-worker protocol. Both ends must agree."""

MAX_MESSAGE_BYTES = 64 * 2**20
"""The largest gRPC message between any two processes."""

SEED_STRIDE = 0x9E3779B97F4A7C15
"""The distance of the seeds of two answers of one request: odd and large, so that requests with
nearby seeds share no answers."""


class Role(enum.StrEnum):
    """The phase that a worker serves."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(enum.Enum):
    """Why an answer ended. The values are those of baton.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    TOOL_CALLS = 3


class DeviceEvent(Protocol):
    """A point in a device's queue of work, such as a torch.cuda.Event."""

    def query(self) -> bool:
        """True if all work queued before it is done."""


class AttemptKey(NamedTuple):
    """One attempt at one answer. A message of an older epoch matches nothing."""

    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How each next token is chosen. The defaults are greedy, without penalties."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    # Unique token ids, and what is added to their logits.
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Tokens of the answer, and of prompt and answer, before a stop token may come.
    min_tokens: int = 0
    min_length: int = 0
    # No n-gram of this size occurs twice in prompt and answer; 0 allows it.
    no_repeat_ngram_size: int = 0
    # Tokens that never occur, and those that never occur first.
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    # Sequences that never occur: each one's last token is banned after the others.
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    # Read for every row of every step: True if logits are changed before a token is chosen, and if
    # earlier tokens decide how.
    adjusts: bool = field(init=False, repr=False)
    looks_back: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        looks_back = self.penalizes or bool(self.no_repeat_ngram_size or self.bad_words_ids)
        adjusts = looks_back or self.bans or bool(self.logit_bias)
        object.__setattr__(self, "looks_back", looks_back)
        object.__setattr__(self, "adjusts", adjusts)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def filters(self) -> bool:
        """True if some tokens are dropped before one is drawn."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalizes(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def bans(self) -> bool:
        """True if some tokens are ruled out (engine/sampler.py)."""
        return bool(
            self.min_tokens
            or self.min_length
            or self.no_repeat_ngram_size
            or self.suppress_tokens
            or self.begin_suppress_tokens
            or self.bad_words_ids
        )

    def for_answer(self, index: int) -> Sampling:
        """The sampling of one of several answers. Answer 0 is the same as with n=1."""
        return replace(self, seed=(self.seed + index * SEED_STRIDE) % 2**64)


class Logprobs(NamedTuple):
    """A token's log probability, and the likeliest tokens in its place.

    Natural logarithms of the model's probabilities, before temperature, penalties and biases.
    """

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Adapter(NamedTuple):
    """A LoRA adapter: the digest of its content, and its location (core/adapter_store.py)."""

    digest: bytes
    folder: str
    sources: tuple[str, ...] = ()  # addresses of workers that may have its files


class Pooling(enum.Enum):
    """How a prompt's last hidden states become one vector. The values are those of
    baton.v1.Pooling."""

    LAST = 1
    MEAN = 2
    ENCODER = 3  # by the embedding model, whose tokens the prompt has


LAST_PRIORITY = 1000
"""The priority of background requests, such as those of batches."""


@dataclass(frozen=True, slots=True)
class Work:
    """One attempt as workers see it: token ids and numbers, no text."""

    key: AttemptKey
    # The prompt, then the tokens that earlier attempts have emitted.
    prompt_tokens: Sequence[int]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: frozenset[int]
    # How many of the prompt_tokens, at their end, are answer tokens.
    answer_tokens: int = 0
    # Cached pages are shared only among requests of the same salt.
    cache_salt: str = ""
    # Alternatives to return with each token's logprob; None returns no logprobs.
    logprobs: int | None = None
    # What the answer must match, as an llguidance grammar; empty: anything.
    grammar: str = ""
    # The same as logprobs, for the prompt's tokens from its second on.
    prompt_logprobs: int | None = None
    # The answer as the caller predicts it: guesses that steps check (speculation).
    prediction: Sequence[int] = ()
    # The lower, the earlier its worker serves it.
    priority: int = 0
    # Shares no step with other requests, since it was on workers that were lost.
    alone: bool = False
    # The LoRA adapter; None: the model's own weights.
    adapter: Adapter | None = None
    # How the prompt's hidden states become its embedding; None if none is wanted.
    pooling: Pooling | None = None
    # How long the prompt's cached pages count as used, once they are computed.
    retain_seconds: int = 0
    # Keys of the prompt's full pages (core/page_keys.py) in a router. Not sent to workers.
    page_keys: Sequence[bytes] = ()

    @property
    def cache_name(self) -> str:
        """Requests with the same name share pages. A prompt that needs all its rows shares none,
        since cached pages have no logprobs and no hidden states."""
        if not self.needs_all_rows:
            return self.cache_salt
        return f"{self.cache_salt}\n{self.key.request_id}\n{self.key.epoch}"

    @property
    def background(self) -> bool:
        """True if it pauses while other requests are served."""
        return self.priority >= LAST_PRIORITY

    @property
    def adapter_digest(self) -> bytes:
        """Empty without an adapter."""
        return self.adapter.digest if self.adapter else b""

    @property
    def needs_all_rows(self) -> bool:
        """True if the last layer computes every token of the prompt."""
        return self.prompt_logprobs is not None or self.pooling is Pooling.MEAN

    @property
    def tokens_wanted(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - self.answer_tokens

    def finish_reason(self, token: int, generated: int) -> FinishReason | None:
        """Why `token`, the `generated`-th of the answer, ends it; None if it does not."""
        if token in self.stop_token_ids:
            return FinishReason.STOP
        if generated >= self.max_tokens:
            return FinishReason.LENGTH
        return None


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # as JSON


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str
    # In the assistant's messages: its calls.
    tool_calls: tuple[ToolCall, ...] = ()
    # In a tool's message: the call that it answers.
    tool_call_id: str = ""
    # The speaker's name beside the role; a tool's name.
    name: str = ""
    # In the assistant's messages: its reasoning.
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may request a call of."""

    name: str
    description: str = ""
    parameters: str = "{}"  # a JSON Schema


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    # A tool must be called; the tools that may be called (empty: any).
    must_call: bool = False
    allowed_tools: tuple[str, ...] = ()
    # Further variables of the chat template, as a JSON object.
    template_kwargs: str = "{}"
    # After the last message, an answer begins or nothing follows, or the message is continued.
    end: Literal["open", "closed", "continued"] = "open"

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        allowed = self.allowed_tools
        return tuple(tool for tool in self.tools if not allowed or tool.name in allowed)


Prompt = str | tuple[int, ...] | ChatPrompt
"""Text to continue, token ids, or a conversation."""


@dataclass(frozen=True, slots=True)
class Structure:
    """What an answer must match: a JSON Schema, a regular expression, a Lark grammar, or the
    grammar of a forced call of a tool."""

    kind: Literal["json_schema", "regex", "lark", "call"]
    source: str
    given_as: str = field(default="", compare=False)
    """The request's field; by default that of gRPC."""

    @property
    def request_field(self) -> str:
        """The field that errors name."""
        return self.given_as or {"lark": "grammar", "call": "tools"}.get(self.kind, self.kind)


ToolFormatName = Literal[
    "auto",
    "deepseek-v3",
    "deepseek-v3.1",
    "functiongemma",
    "gemma",
    "glm",
    "harmony",
    "hermes",
    "kimi",
    "llama3",
    "mistral",
    "mistral-args",
    "qwen3-coder",
]
"""A format of router/answers/tool_formats.py; auto derives it from the chat template."""


class Caching(enum.Enum):
    """How a request may use the response cache. The values are those of Cache-Control."""

    ALLOWED = ""
    NEVER = "no-store"
    RENEW = "no-cache"  # computed, and kept
    ONLY = "only-if-cached"  # not computed

    @classmethod
    def parse(cls, header: str) -> Caching:
        """The strictest directive of a Cache-Control header; others are ignored."""
        given = {part.strip().lower() for part in header.split(",")} if header else ()
        strict = (cls.NEVER, cls.RENEW, cls.ONLY)
        return next((each for each in strict if each.value in given), cls.ALLOWED)


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request, before its prompt is turned into tokens."""

    request_id: str
    prompt: Prompt
    sampling: Sampling
    max_tokens: int | None  # None: as many as the context holds; 0 only scores the prompt
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    n: int = 1  # answers
    # Alternatives to return with each token's logprob; None returns no logprobs.
    logprobs: int | None = None
    # The same for the prompt's tokens, from its second on.
    prompt_logprobs: int | None = None
    # How the prompt's hidden states become its embedding; None if none is wanted.
    pooling: Pooling | None = None
    # What every answer must match; None: anything.
    structure: Structure | None = None
    # The answer as the caller predicts it: matching parts are faster (speculation).
    prediction: str = ""
    # Add the model's special tokens to a text prompt, and leave them out of answers.
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    # How many of the prompt's last tokens to keep; -1: as many as leave room for the answer.
    truncate_prompt_tokens: int | None = None
    # The model's name as the caller gave it, and the adapter that it stands for.
    model: str = ""
    adapter: Adapter | None = None
    # Cached pages are shared only among requests of the same salt.
    cache_salt: str = ""
    # How long the prompt's cached pages count as used, once they are computed.
    retain_seconds: int = 0
    # The API key's name; empty where no key is required.
    tenant: str = ""
    # The lower, the earlier it is admitted. Tenants of one priority take turns.
    priority: int = 0
    # The caller chose the sampling's seed.
    seeded: bool = False
    caching: Caching = Caching.ALLOWED
    # Minimum similarity of a question whose cached answer may be used; None: the same request's.
    semantic_similarity: float | None = None
    # The caller's deadline, on time.monotonic()'s clock.
    deadline: float = math.inf
    # Tokens that the caller received before its stream broke. The answer continues after them.
    resumed: tuple[int, ...] = ()

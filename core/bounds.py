"""Bounds of a request: one table for gRPC, HTTP (with its OpenAPI document) and workers.

Sampling follows the OpenAI API over gRPC too: a temperature above 2 is refused, since it leaves
little but noise, and top_p 0 keeps the likeliest token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from baton.core.errors import InvalidGrammar, InvalidRequest, InvalidSampling, TokenOutOfRange
from baton.core.types import LAST_PRIORITY, Sampling, Work

MAX_REQUEST_BYTES = 8 * 2**20
"""Bytes of a gRPC message or an HTTP body: more than a million tokens, as text or as ids."""

MAX_VALUES = 300_000
"""Values in a JSON body: decoding them takes about 0.05 seconds, and they hold a context of 2**18
token ids. gRPC accepts longer lists."""

_COSTS = {b",": 1, b"[": 1, b"{": 1, b":": 3}
"""Characters that come with a value or a key, and their cost, in numbers to parse."""

MAX_PROMPT_TOKENS = 2_000_000
MAX_TOKEN_ID = 2**32 - 1
MAX_MESSAGES = 4096
MAX_ANSWERS = 16
MAX_INPUTS = 128  # texts to embed or to complete in one call
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 1024
MAX_REQUEST_ID = 128
MAX_CACHE_SALT = 256
MAX_BIASES = 1024
MAX_CACHE_TTL = 86_400

MAX_PRIORITY = LAST_PRIORITY
"""The last priority. The first is -MAX_PRIORITY."""

TIER_PRIORITIES = {"priority": -100, "flex": 100, "batch": MAX_PRIORITY}
"""Priorities of service tiers; that of any other is 0."""

MAX_BANNED = 16_384
"""Token ids in suppress_tokens, begin_suppress_tokens and bad_words_ids together."""

MAX_NGRAM = 64
"""The largest no_repeat_ngram_size, since each step looks for the n-gram in all tokens."""

MAX_PREDICTION = 128 * 2**10
"""Characters of an answer that the caller predicts."""

MAX_TOP_LOGPROBS = 20
"""Alternatives returned with each token."""

MAX_TOOLS = 128

MAX_STRUCTURE = 128 * 2**10
"""Characters of a JSON Schema, a regular expression or a Lark grammar."""

MAX_GRAMMAR = 4 * MAX_STRUCTURE
"""Characters of the llguidance grammar that it is compiled to."""


def count_values(content: bytes) -> int:
    """An upper bound on the values in a JSON text. A key counts as three, and commas within strings
    count too."""
    return sum(cost * content.count(sign) for sign, cost in _COSTS.items())


class Range(NamedTuple):
    """From `least` (excluded when `above`) to `most`."""

    least: float
    most: float
    above: bool = False

    def check(self, name: str, value: float, field: str) -> None:
        # NaN compares false.
        if self.least <= value <= self.most and not (self.above and value == self.least):
            return
        least = f"above {self.least:g}" if self.above else f"at least {self.least:g}"
        raise InvalidSampling(
            f"{name} must be {least} and at most {self.most:g}, not {value:g}", field=field
        )


SAMPLING = {
    "temperature": Range(0.0, 2.0),
    "top_p": Range(0.0, 1.0),
    "min_p": Range(0.0, 1.0),
    "repetition_penalty": Range(0.0, 100.0, above=True),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
}
LOGIT_BIAS = Range(-100.0, 100.0)


def checked(sampling: Sampling, prefix: str = "") -> Sampling:
    """Checks and normalizes. Raises InvalidSampling with `prefix` before the field's name."""
    for name, bounds in SAMPLING.items():
        bounds.check(name, getattr(sampling, name), prefix + name)
    for token, bias in sampling.logit_bias:
        LOGIT_BIAS.check(f"logit_bias of token {token}", bias, f"{prefix}logit_bias")
    _check_bans(sampling, prefix)
    return normalized(sampling)


def _check_bans(sampling: Sampling, prefix: str) -> None:
    size = sampling.no_repeat_ngram_size
    Range(0, MAX_NGRAM).check("no_repeat_ngram_size", size, f"{prefix}no_repeat_ngram_size")
    if not all(sampling.bad_words_ids):
        raise InvalidSampling("a bad word has no tokens", field=f"{prefix}bad_words_ids")
    lists = (sampling.suppress_tokens, sampling.begin_suppress_tokens, *sampling.bad_words_ids)
    if sum(map(len, lists)) > MAX_BANNED:
        raise InvalidSampling(
            "suppress_tokens, begin_suppress_tokens and bad_words_ids must have at most"
            f" {MAX_BANNED} token ids together",
            field=f"{prefix}suppress_tokens",
        )


def normalized(sampling: Sampling) -> Sampling:
    """Replaces top_p 0 by top_k 1."""
    return sampling if sampling.top_p else replace(sampling, top_k=1, top_p=1.0)


def check_vocabulary(ids: Sequence[int], size: int, field: str = "token_ids") -> None:
    """Raises TokenOutOfRange for `field` if one of the ids, none of them negative, is too large."""
    if max(ids, default=0) >= size:
        raise TokenOutOfRange(
            f"token id {max(ids)} is outside the vocabulary of {size}", field=field
        )


def check_work(work: Work, vocabulary_size: int) -> None:
    """Raises an error unless the engine can run the work.

    A router checks more, for users; this protects the engine from a faulty router.
    """
    if not work.prompt_tokens:
        raise InvalidRequest("the prompt is empty", field="prompt")
    check_vocabulary(work.prompt_tokens, vocabulary_size)
    if work.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", field="max_tokens")
    if work.answer_tokens >= min(len(work.prompt_tokens), work.max_tokens):
        raise InvalidRequest(
            "answer_tokens must be less than the prompt's length and max_tokens",
            field="answer_tokens",
        )
    if max(work.logprobs or 0, work.prompt_logprobs or 0) > MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"logprobs must be at most {MAX_TOP_LOGPROBS}", field="logprobs")
    if len(work.grammar) > MAX_GRAMMAR:
        raise InvalidGrammar(f"a grammar has at most {MAX_GRAMMAR} characters", field="grammar")
    biased = max(dict(work.sampling.logit_bias), default=0)
    if biased >= vocabulary_size:
        raise TokenOutOfRange(
            f"logit_bias names token {biased}, outside the vocabulary of {vocabulary_size}",
            field="logit_bias",
        )
    checked(work.sampling)

"""What chats and completions have in common.

Fields that nobody here knows are ignored, as clients of the OpenAI API expect:
they send what other servers understand. Fields that would change the answer,
and that a client would wait for in vain, are refused by name.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.bounds import (
    MAX_ANSWERS,
    MAX_BIASES,
    MAX_CACHE_SALT,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)
from baton.core.errors import InvalidRequest
from baton.core.types import Prompt, Request, Sampling
from baton.router.edges.http.fields import (
    Biases,
    Field,
    Flag,
    Integer,
    Json,
    Number,
    String,
    Strings,
    TokenIds,
    Unserved,
    wrong_type,
)
from baton.router.edges.http.structure import READ as STRUCTURE_FIELDS
from baton.router.edges.http.structure import read_structure

MODEL = String("model", "As /v1/models names it. Absent: the one that is served.", 1024)
MAX_TOKENS = Integer("max_tokens", "The most tokens of one answer.", 1, 2**32 - 1)
MAX_COMPLETION_TOKENS = Integer(
    "max_completion_tokens", "The newer name of max_tokens, which it goes before.", 1, 2**32 - 1
)
TEMPERATURE = Number("temperature", "0 takes the most likely token.", 0.0, 2.0, 1.0)
TOP_P = Number(
    "top_p",
    "Keep the smallest set of tokens whose probability reaches this; 0 keeps one.",
    0.0,
    1.0,
    1.0,
)
TOP_K = Integer("top_k", "Keep the k most likely tokens; 0 or -1 keeps all.", -1, 2**32 - 1, 0)
MIN_P = Number(
    "min_p", "Keep tokens at least this fraction as likely as the likeliest.", 0.0, 1.0, 0.0
)
REPETITION_PENALTY = Number(
    "repetition_penalty",
    "Makes every token of prompt and answer less likely.",
    0.0,
    100.0,
    1.0,
    above=True,
)
PRESENCE_PENALTY = Number(
    "presence_penalty", "Taken from the logit of every token of the answer.", -2.0, 2.0, 0.0
)
FREQUENCY_PENALTY = Number(
    "frequency_penalty", "Taken from a token's logit each time it occurs.", -2.0, 2.0, 0.0
)
LOGIT_BIAS = Biases("logit_bias", "By token id: what is added to its logit.", MAX_BIASES, 100.0)
SEED = Integer("seed", "The same seed gives the same answer. Absent: drawn.", -(2**63), 2**64 - 1)
ANSWERS = Integer("n", "Answers to each prompt.", 1, MAX_ANSWERS, 1)
STOP = Strings(
    "stop", "The text is cut before the first of these.", MAX_STOP_STRINGS, MAX_STOP_CHARACTERS
)
STOP_TOKEN_IDS = TokenIds("stop_token_ids", "Tokens that end the answer.", MAX_STOP_TOKENS)
IGNORE_EOS = Flag("ignore_eos", "Go on past the model's end tokens.")
CACHE_SALT = String(
    "cache_salt", "Cached work is shared only among requests of one salt.", MAX_CACHE_SALT
)
STREAM = Flag("stream", "Send the answer as server-sent events.")
USER = String("user", "Ignored.", 1024)

READ: tuple[Field, ...] = (
    MODEL,
    MAX_TOKENS,
    MAX_COMPLETION_TOKENS,
    TEMPERATURE,
    TOP_P,
    TOP_K,
    MIN_P,
    REPETITION_PENALTY,
    PRESENCE_PENALTY,
    FREQUENCY_PENALTY,
    LOGIT_BIAS,
    SEED,
    ANSWERS,
    STOP,
    STOP_TOKEN_IDS,
    IGNORE_EOS,
    CACHE_SALT,
    *STRUCTURE_FIELDS,
    STREAM,
    USER,
)

_STRUCTURED = "answers of a given structure"

UNSERVED = (
    Unserved("bad_words", "biases", ([],)),
    Unserved("allowed_token_ids", "biases", ([],)),
    Unserved("structured_outputs", _STRUCTURED, ({},)),
    Unserved("guided_json", _STRUCTURED),
    Unserved("guided_regex", _STRUCTURED),
    Unserved("guided_choice", _STRUCTURED),
    Unserved("guided_grammar", _STRUCTURED),
    Unserved("use_beam_search", "beam search", (False,)),
    Unserved("min_tokens", "a least number of tokens", (0,)),
    Unserved("truncate_prompt_tokens", "cut prompts"),
    Unserved("add_special_tokens", "prompts without special tokens", (True,)),
    Unserved("skip_special_tokens", "answers with special tokens", (True,)),
    Unserved("include_stop_str_in_output", "answers with their stop string", (False,)),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One call: what is to be generated, and how it is to be told."""

    request_id: str
    # One a prompt; all alike otherwise.
    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool
    # Whether answers begin with their prompt.
    echo: bool = False
    # Whether it is told how likely the prompts' tokens were, apart from the answers'.
    prompt_scored: bool = False

    @property
    def n(self) -> int:
        """Answers to each prompt."""
        return self.requests[0].n

    @property
    def scored(self) -> bool:
        """Whether each token is told with its log probability."""
        return self.requests[0].logprobs is not None


def read_asked(
    body: Json,
    request_id: str,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int | None = None,
    echo: bool = False,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> Asked:
    """Everything but the prompts. `max_tokens` is what holds where the body does not say."""
    for field in UNSERVED:
        field.check(body)
    USER.of(body)
    stream = STREAM.of(body)
    requests = (_read_request(body, request_id, prompt, max_tokens) for prompt in prompts)
    return Asked(
        request_id,
        tuple(
            dataclasses.replace(
                request,
                logprobs=logprobs,
                prompt_logprobs=logprobs if echo and prompt_logprobs is None else prompt_logprobs,
            )
            for request in requests
        ),
        stream,
        _read_include_usage(body, stream),
        echo,
        prompt_logprobs is not None,
    )


def _read_request(body: Json, request_id: str, prompt: Prompt, max_tokens: int | None) -> Request:
    return Request(
        request_id=request_id,
        prompt=prompt,
        sampling=_read_sampling(body),
        max_tokens=MAX_COMPLETION_TOKENS.of(body) or MAX_TOKENS.of(body) or max_tokens,
        stop=STOP.of(body),
        stop_token_ids=frozenset(STOP_TOKEN_IDS.of(body)),
        ignore_eos=IGNORE_EOS.of(body),
        n=ANSWERS.of(body) or 1,
        cache_salt=CACHE_SALT.of(body),
        structure=read_structure(body),
    )


def _read_sampling(body: Json) -> Sampling:
    seed = SEED.of(body)
    top_p = TOP_P.of(body)
    top_k = max(TOP_K.of(body) or 0, 0)
    return Sampling(
        temperature=TEMPERATURE.of(body),
        # The smallest set of tokens is one token.
        top_k=top_k if top_p else 1,
        top_p=top_p or 1.0,
        min_p=MIN_P.of(body),
        repetition_penalty=REPETITION_PENALTY.of(body),
        presence_penalty=PRESENCE_PENALTY.of(body),
        frequency_penalty=FREQUENCY_PENALTY.of(body),
        seed=secrets.randbits(63) if seed is None else seed % 2**64,
        logit_bias=LOGIT_BIAS.of(body),
    )


def _read_include_usage(body: Json, stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise wrong_type("stream_options", "an object", options)
    if not stream:
        raise InvalidRequest("stream_options needs stream to be true", field="stream_options")
    return INCLUDE_USAGE.of(options)


INCLUDE_USAGE = Flag("include_usage", "Send the usage in a last chunk without choices.")

STREAM_OPTIONS_SCHEMA: Json = {
    "type": ["object", "null"],
    "properties": {INCLUDE_USAGE.name: INCLUDE_USAGE.schema},
    "description": "Only together with stream.",
}

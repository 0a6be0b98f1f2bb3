"""The request fields that all APIs share."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag

from baton.core import bounds
from baton.core.errors import InvalidRequest
from baton.core.generation_defaults import GenerationDefaults
from baton.core.types import Prompt, Request, Sampling, Structure
from baton.router.edges.http.request_model import (
    DURATION,
    RequestModel,
    StrictModel,
    Unserved,
    about,
    invalid,
    seconds_of,
    token_ids,
)

API_TEMPERATURE = 1.0
"""The APIs' own default."""

MAX_PROMPT_CHARACTERS = 8_000_000
MAX_NAME = 1024

PromptText = Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)]
ShortText = Annotated[str, Field(max_length=MAX_NAME)]
Part = TypeVar("Part")
TextOrParts = Annotated[
    Annotated[PromptText, Tag("<text>")]
    | Annotated[list[Part], Field(fail_fast=True), Tag("<parts>")],
    Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
]
StopString = Annotated[str, Field(min_length=1, max_length=bounds.MAX_STOP_CHARACTERS)]
Bias = Annotated[float, Field(ge=bounds.LOGIT_BIAS.least, le=bounds.LOGIT_BIAS.most)]
TokenKey = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
TokenCount = Annotated[int, Field(ge=1, le=2**32 - 1)]
TopLogprobs = Annotated[int, Field(ge=0, le=bounds.MAX_TOP_LOGPROBS)]


def _sampling(name: str, default: float, description: str) -> Any:
    """A field with the bounds of core/bounds.py. `default` applies if the model has none."""
    least, most, above = bounds.SAMPLING[name]
    return about(
        f"{description} Absent: the model's default, or else the default here.",
        default,
        le=most,
        **{"gt" if above else "ge": least},
    )


def _bounded_biases(value: object) -> object:
    """Checks the size first, since each wrong entry adds an error."""
    if isinstance(value, dict) and len(value) > bounds.MAX_BIASES:
        raise invalid(f"must have at most {bounds.MAX_BIASES} entries")
    return value


_BIAS_SCHEMA = {"additionalProperties": False, "maxProperties": bounds.MAX_BIASES}
Biases = Annotated[
    dict[TokenKey, Bias],
    BeforeValidator(_bounded_biases),
    Field(json_schema_extra=_BIAS_SCHEMA),
]
StopList = Annotated[list[StopString], Field(fail_fast=True, max_length=bounds.MAX_STOP_STRINGS)]
Stops = Annotated[
    StopList,
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value,
        json_schema_input_type=StopString | StopList,
    ),
]
BannedIds = Annotated[tuple[int, ...], token_ids(bounds.MAX_BANNED)]
# Values of the OpenAI API and of Anthropic's.
ServiceTier = Literal["auto", "default", "standard_only", "scale", "priority", "flex", "batch"]
_SAMPLING_FIELDS = {each.name for each in dataclasses.fields(Sampling)}


def _ttl(value: object) -> object:
    return seconds_of(value) if isinstance(value, str) else value


class CacheHint(StrictModel):
    ttl: Annotated[
        int,
        BeforeValidator(
            _ttl,
            json_schema_input_type=Annotated[int, Field(ge=0, le=bounds.MAX_CACHE_TTL)]
            | Annotated[str, Field(pattern=DURATION)],
        ),
        Field(ge=0, le=bounds.MAX_CACHE_TTL),
    ] = Field(description='Seconds, or a number and s, m, h or d, such as "1h".')


class PromptRequest(RequestModel):
    """The fields of all APIs whose prompts workers compute."""

    model: ShortText = about("A name from /v1/models. Absent: the only served model.", "")
    cache_salt: Annotated[str, Field(max_length=bounds.MAX_CACHE_SALT)] = about(
        "Cached pages are shared only among requests of one salt.", ""
    )
    priority: int | None = about(
        "The lower, the earlier it is admitted. Absent: by the service tier, or 0.",
        ge=-bounds.MAX_PRIORITY,
        le=bounds.MAX_PRIORITY,
    )
    service_tier: ServiceTier = about(
        "A name for a priority: priority is -100, flex 100, batch 1000, any other 0.", "auto"
    )
    truncate_prompt_tokens: int | None = about(
        "Keep only this many of the prompt's last tokens; -1: as many as leave room for the"
        " answer.",
        ge=-1,
        le=2**32 - 1,
    )
    stream: bool = about("Send the answer as server-sent events.", False)

    def requests(self, request_id: str, defaults: GenerationDefaults) -> tuple[Request, ...]:
        """One request for each prompt; they differ in prompt and seed only."""
        raise NotImplementedError

    def _priority(self) -> int:
        if self.priority is not None:
            return self.priority
        return bounds.TIER_PRIORITIES.get(self.service_tier, 0)


class GenerationRequest(PromptRequest):
    """The fields of all APIs that generate."""

    temperature: float = _sampling("temperature", API_TEMPERATURE, "0 takes the likeliest token.")
    top_p: float = _sampling(
        "top_p", 1.0, "Keep the smallest set of this probability; 0: one token."
    )
    top_k: int = about("Keep the k likeliest tokens; 0 or -1 keeps all.", 0, ge=-1, le=2**32 - 1)
    min_p: float = _sampling("min_p", 0.0, "Least probability of a token, relative to the best.")
    repetition_penalty: float = _sampling(
        "repetition_penalty", 1.0, "Makes every token of prompt and answer less likely."
    )
    presence_penalty: float = _sampling(
        "presence_penalty", 0.0, "Subtracted from the logit of every token of the answer."
    )
    frequency_penalty: float = _sampling(
        "frequency_penalty", 0.0, "Subtracted from a token's logit each time it occurs."
    )
    logit_bias: Biases | None = about("Numbers to add to logits, by token id.")
    min_tokens: int = about("Minimum tokens before a stop token.", 0, ge=0, le=2**32 - 1)
    no_repeat_ngram_size: int = about(
        "No n-gram of this size occurs twice; 0 allows it.", 0, ge=0, le=bounds.MAX_NGRAM
    )
    suppress_tokens: BannedIds = about("Token ids that never occur.", ())
    begin_suppress_tokens: BannedIds = about("Token ids that never occur first.", ())
    bad_words_ids: Annotated[
        list[BannedIds], Field(fail_fast=True, max_length=bounds.MAX_BANNED)
    ] = about("Sequences of token ids that never occur.", ())
    seed: int | None = about(
        "Makes the answer repeatable. Absent: random.", ge=-(2**63), le=2**64 - 1
    )
    stop_token_ids: Annotated[tuple[int, ...], token_ids(bounds.MAX_STOP_TOKENS)] = about(
        "Tokens that end the answer.", ()
    )
    cache_hint: CacheHint | None = about(
        "How long to expect more prompts with this prefix; its pages are evicted later."
    )
    prompt_cache_retention: ShortText = about('"24h" is a cache_hint of that ttl.', "")
    ignore_eos: bool = about("Continue past the model's end tokens.", False)
    skip_special_tokens: bool = about("Leave special tokens out of the answer's text.", True)
    semantic_similarity: float | None = about(
        "Allows a cached answer to a question of at least this cosine similarity, or of the"
        " operator's minimum if that is higher. Absent: as the header or the API key says.",
        ge=0,
        le=1,
    )
    unserved: ClassVar[dict[str, Unserved]] = {
        "bad_words": Unserved("words as text; send their token ids as bad_words_ids", ([],)),
        "allowed_token_ids": Unserved("restriction to some tokens", ([],)),
        "use_beam_search": Unserved("beam search", (False,)),
        "include_stop_str_in_output": Unserved("answers that include the stop string", (False,)),
    }

    def _request(
        self,
        request_id: str,
        defaults: GenerationDefaults,
        prompt: Prompt,
        *,
        max_tokens: int | None,
        stop: Sequence[str],
        structure: Structure | None,
        **fields: Any,
    ) -> Request:
        """`fields` are further fields of Request."""
        return Request(
            request_id=request_id,
            prompt=prompt,
            sampling=self._sampling(defaults),
            max_tokens=defaults.max_tokens if max_tokens is None else max_tokens,
            stop=tuple(stop),
            stop_token_ids=frozenset(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            cache_salt=self.cache_salt,
            retain_seconds=self._retain_seconds(),
            priority=self._priority(),
            seeded=self.seed is not None,
            structure=structure,
            skip_special_tokens=self.skip_special_tokens,
            semantic_similarity=self.semantic_similarity,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            **fields,
        )

    def _retain_seconds(self) -> int:
        if self.cache_hint is not None:
            return self.cache_hint.ttl
        return seconds_of("24h") if self.prompt_cache_retention == "24h" else 0

    def _sampling(self, defaults: GenerationDefaults) -> Sampling:
        given: dict[str, Any] = {
            name: getattr(self, name) for name in _SAMPLING_FIELDS & self.model_fields_set
        }
        given["seed"] = secrets.randbits(63) if self.seed is None else self.seed % 2**64
        given["logit_bias"] = self._biases()
        if "top_k" in given:
            given["top_k"] = max(self.top_k, 0)
        if "bad_words_ids" in given:
            given["bad_words_ids"] = tuple(self.bad_words_ids)
        return defaults.sampling(given, temperature=API_TEMPERATURE)

    def _biases(self) -> tuple[tuple[int, float], ...]:
        biases = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        if max(biases, default=0) > bounds.MAX_TOKEN_ID:
            raise InvalidRequest(
                f"logit_bias must have token ids as its keys, not {max(biases)}", field="logit_bias"
            )
        return tuple(sorted(biases.items()))

"""The fields that chats and completions share, and the body of /v1/completions."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from baton.core import bounds
from baton.core.errors import InvalidRequest
from baton.core.generation_defaults import NO_DEFAULTS, GenerationDefaults
from baton.core.types import (
    Prompt,
    Request,
    Sampling,
    Structure,
)
from baton.router.edges.http.request_model import (
    RequestModel,
    TokenId,
    Unserved,
    about,
    invalid,
    shown,
    token_ids,
)
from baton.router.prompts.output_grammar import ANY_OBJECT

DEFAULT_COMPLETION_TOKENS = 16
"""The API's own default of /v1/completions."""

API_TEMPERATURE = 1.0
"""The API's own default."""

MAX_CHOICES = 128
"""Prompts times answers to each."""

MAX_PROMPT_CHARACTERS = 8_000_000
MAX_NAME = 1024

PromptText = Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)]
ShortText = Annotated[str, Field(max_length=MAX_NAME)]
StructureText = Annotated[str, Field(max_length=bounds.MAX_STRUCTURE)]
StopString = Annotated[str, Field(min_length=1, max_length=bounds.MAX_STOP_CHARACTERS)]
Bias = Annotated[float, Field(ge=bounds.LOGIT_BIAS.least, le=bounds.LOGIT_BIAS.most)]
TokenKey = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
TokenCount = Annotated[int, Field(ge=1, le=2**32 - 1)]
TopLogprobs = Annotated[int, Field(ge=0, le=bounds.MAX_TOP_LOGPROBS)]


def _sampling(name: str, default: float, description: str) -> Any:
    """A field with the bounds of core/bounds.py, and a default where the model has none."""
    least, most, above = bounds.SAMPLING[name]
    return about(
        f"{description} Absent: the model's default, or this.",
        default,
        le=most,
        **{"gt" if above else "ge": least},
    )


class JsonSchemaFormat(RequestModel):
    # Followed whether it is marked strict or not.
    json_schema: dict[str, object] | None = Field(None, alias="schema")


_FORMAT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "object", "properties": {"schema": {"type": ["object", "null"]}}},
        {"description": "Anything: ignored for other types."},
    ]
}


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchemaFormat | None, WithJsonSchema(_FORMAT_SCHEMA)] = Field(
        None, validate_default=True
    )

    @field_validator("json_schema", mode="wrap")
    @classmethod
    def _schema_of_its_type(cls, value: Any, validate: Any, info: ValidationInfo) -> Any:
        """Ignored for other types."""
        if info.data.get("type") != "json_schema":
            return None
        if value is None:
            raise invalid("must be an object, not null")
        return validate(value)

    @property
    def structure(self) -> Structure | None:
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.json_schema is None:
            return ANY_OBJECT
        return Structure("json_schema", json.dumps(self.json_schema.json_schema))


class StreamOptions(RequestModel):
    include_usage: bool = about("Send the usage in a last chunk without choices.", False)


def _bounded_biases(value: object) -> object:
    """Checks the size first: each wrong entry would be one error."""
    if isinstance(value, dict) and len(value) > bounds.MAX_BIASES:
        raise invalid(f"must have at most {bounds.MAX_BIASES} entries")
    return value


_BIAS_SCHEMA = {"additionalProperties": False, "maxProperties": bounds.MAX_BIASES}
Biases = Annotated[
    dict[TokenKey, Bias],
    BeforeValidator(_bounded_biases),
    Field(json_schema_extra=_BIAS_SCHEMA),
]
_StopList = Annotated[list[StopString], Field(fail_fast=True, max_length=bounds.MAX_STOP_STRINGS)]
Stops = Annotated[
    _StopList,
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value,
        json_schema_input_type=StopString | _StopList,
    ),
]
BannedIds = Annotated[tuple[int, ...], token_ids(bounds.MAX_BANNED)]
_SAMPLING_FIELDS = {each.name for each in dataclasses.fields(Sampling)}
_STRUCTURED = "answers of a given structure"


class GenerationRequest(RequestModel):
    """The fields that chats and completions share."""

    model: ShortText = about("As /v1/models names it. Absent: the one that is served.", "")
    max_tokens: TokenCount | None = about("The most tokens of one answer.")
    max_completion_tokens: TokenCount | None = about("The newer max_tokens; takes precedence.")
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
    logit_bias: Biases | None = about("By token id: added to its logit.")
    min_tokens: int = about("Tokens before a stop token may come.", 0, ge=0, le=2**32 - 1)
    no_repeat_ngram_size: int = about(
        "No run of this many tokens comes twice; 0 allows it.", 0, ge=0, le=bounds.MAX_NGRAM
    )
    suppress_tokens: BannedIds = about("Tokens that never come.", ())
    begin_suppress_tokens: BannedIds = about("Tokens that never come first.", ())
    bad_words_ids: Annotated[
        list[BannedIds], Field(fail_fast=True, max_length=bounds.MAX_BANNED)
    ] = about("Runs of tokens that never come.", ())
    seed: int | None = about("Repeats an answer. Absent: drawn.", ge=-(2**63), le=2**64 - 1)
    n: int = about("Answers to each prompt.", 1, ge=1, le=bounds.MAX_ANSWERS)
    stop: Stops = about("The text is cut before the first of these.", ())
    stop_token_ids: Annotated[tuple[int, ...], token_ids(bounds.MAX_STOP_TOKENS)] = about(
        "Tokens that end the answer.", ()
    )
    ignore_eos: bool = about("Continue past the model's end tokens.", False)
    cache_salt: Annotated[str, Field(max_length=bounds.MAX_CACHE_SALT)] = about(
        "Cached pages are shared only among requests of one salt.", ""
    )
    response_format: ResponseFormat | None = about("At most one of this, regex and grammar.")
    regex: StructureText = about("The whole answer matches this regular expression.", "")
    grammar: StructureText = about("The answer follows this grammar, in llguidance's Lark.", "")
    stream: bool = about("Send the answer as server-sent events.", False)
    stream_options: StreamOptions | None = about("Only together with stream.")
    user: ShortText = about("Ignored.", "")

    unserved: ClassVar[dict[str, Unserved]] = {
        "bad_words": Unserved("words as text; send their token ids as bad_words_ids", ([],)),
        "allowed_token_ids": Unserved("biases", ([],)),
        "structured_outputs": Unserved(_STRUCTURED, ({},)),
        "guided_json": Unserved(_STRUCTURED),
        "guided_regex": Unserved(_STRUCTURED),
        "guided_choice": Unserved(_STRUCTURED),
        "guided_grammar": Unserved(_STRUCTURED),
        "use_beam_search": Unserved("beam search", (False,)),
        "truncate_prompt_tokens": Unserved("truncated prompts"),
        "add_special_tokens": Unserved("prompts without special tokens", (True,)),
        "skip_special_tokens": Unserved("answers with special tokens", (True,)),
        "include_stop_str_in_output": Unserved("answers with their stop string", (False,)),
    }

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def requests(
        self,
        request_id: str,
        salt: Callable[[str], str],
        defaults: GenerationDefaults = NO_DEFAULTS,
    ) -> tuple[Request, ...]:
        """One for each prompt; they differ in prompt and seed only."""
        raise NotImplementedError

    def _requests(
        self,
        request_id: str,
        salt: Callable[[str], str],
        defaults: GenerationDefaults,
        prompts: Sequence[Prompt],
        *,
        default_tokens: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> tuple[Request, ...]:
        if self.stream_options and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", field="stream_options")
        request = Request(
            request_id=request_id,
            prompt=prompts[0],
            sampling=self._sampling(defaults),
            max_tokens=(
                self.max_completion_tokens
                or self.max_tokens
                or defaults.max_tokens
                or default_tokens
            ),
            stop=tuple(self.stop),
            stop_token_ids=frozenset(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            n=self.n,
            cache_salt=salt(self.cache_salt),
            structure=self._structure(),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        others = (
            dataclasses.replace(request, prompt=prompt, sampling=self._sampling(defaults))
            for prompt in prompts[1:]
        )
        return request, *others

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

    def _structure(self) -> Structure | None:
        given = [Structure("regex", self.regex)] if self.regex else []
        if self.grammar:
            given.append(Structure("lark", self.grammar))
        if self.response_format and (structure := self.response_format.structure):
            given.append(structure)
        if len(given) > 1:
            raise InvalidRequest(
                "at most one of response_format, regex and grammar", field="response_format"
            )
        return given[0] if given else None


_TokenPrompt = Annotated[tuple[int, ...], token_ids(bounds.MAX_PROMPT_TOKENS)]
_OnePrompt = Annotated[
    Annotated[PromptText, Tag("<text>")] | Annotated[_TokenPrompt, Tag("<tokens>")],
    Discriminator(lambda value: "<tokens>" if isinstance(value, list) else "<text>"),
]
_SomeText = Annotated[str, Field(min_length=1)]
_SomeTokens = Annotated[list[TokenId], Field(min_length=1)]
_PromptInput = (
    _SomeText
    | _SomeTokens
    | Annotated[list[_SomeText | _SomeTokens], Field(min_length=1, max_length=MAX_CHOICES)]
)


def _as_prompts(value: object) -> object:
    if not isinstance(value, str | list):
        raise invalid(
            f"must be a string, a list of token ids, or a list of either, not {shown(value)}"
        )
    several = isinstance(value, list) and (not value or isinstance(value[0], str | list))
    return value if several else [value]


class CompletionRequest(GenerationRequest):
    prompt: Annotated[
        list[_OnePrompt],
        Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
        BeforeValidator(_as_prompts, json_schema_input_type=_PromptInput),
    ]
    echo: bool = about("Begin each answer with its prompt, and logprobs with its tokens'.", False)
    logprobs: TopLogprobs | None = about("Return log probabilities, with this many alternatives.")
    prompt_logprobs: TopLogprobs | None = about("The same for the prompt's tokens.")

    unserved: ClassVar[dict[str, Unserved]] = {
        **GenerationRequest.unserved,
        "best_of": Unserved("a choice among more answers than are returned", (1,)),
        "suffix": Unserved("text after the answer", ("",)),
    }

    def requests(
        self,
        request_id: str,
        salt: Callable[[str], str],
        defaults: GenerationDefaults = NO_DEFAULTS,
    ) -> tuple[Request, ...]:
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise InvalidRequest(
                f"prompts times n must be at most {MAX_CHOICES} answers", field="prompt"
            )
        echoed = self.logprobs if self.echo else None
        return self._requests(
            request_id,
            salt,
            defaults,
            self.prompt,
            default_tokens=DEFAULT_COMPLETION_TOKENS,
            logprobs=self.logprobs,
            prompt_logprobs=echoed if self.prompt_logprobs is None else self.prompt_logprobs,
        )

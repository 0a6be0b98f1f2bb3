"""The fields that chats and completions share, such as those for structured output, and the body of
/v1/completions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
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
from baton.core.bounds import MAX_INPUTS
from baton.core.errors import InvalidRequest
from baton.core.generation_defaults import GenerationDefaults
from baton.core.types import Prompt, Request, Structure
from baton.router.edges.http.generation_request import (
    GenerationRequest,
    PromptText,
    ShortText,
    Stops,
    TokenCount,
    TopLogprobs,
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
from baton.router.prompts.output_grammar import ANY_OBJECT, json_structure

DEFAULT_TOKENS = 16
"""OpenAI's default for /v1/completions."""

MAX_CHOICES = MAX_INPUTS
"""Prompts times answers to each."""

MAX_CHOICE_TEXTS = 1024
"""Entries of guided_choice."""

StructureText = Annotated[str, Field(max_length=bounds.MAX_STRUCTURE)]
ChoiceTexts = Annotated[
    list[StructureText], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICE_TEXTS)
]


def _schema_text(value: object) -> object:
    if isinstance(value, dict):
        return json.dumps(value)
    if not isinstance(value, str):
        raise invalid(f"must be a JSON Schema, not {shown(value)}")
    return value


SchemaText = Annotated[
    StructureText,
    BeforeValidator(_schema_text, json_schema_input_type=dict[str, object] | StructureText),
]


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
        """Ignores the schema of other types."""
        if info.data.get("type") != "json_schema":
            return None
        if value is None:
            raise invalid("must be an object, not null")
        return validate(value)

    @property
    def structure(self) -> Structure | None:
        schema = self.json_schema.json_schema if self.json_schema else None
        return None if self.type == "text" else json_structure(schema, "response_format")


class StructuredOutputs(RequestModel):
    """vLLM's structured_outputs."""

    json_schema: SchemaText = Field("", alias="json")
    regex: StructureText = ""
    choice: ChoiceTexts | None = None
    grammar: StructureText = ""
    json_object: bool = False

    unserved: ClassVar[dict[str, Unserved]] = {
        "structural_tag": Unserved("structures within an answer"),
        "whitespace_pattern": Unserved("a whitespace pattern"),
    }

    def structures(self) -> Iterator[Structure]:
        yield from _given("json_schema", **{"structured_outputs.json": self.json_schema})
        yield from _given("regex", **{"structured_outputs.regex": self.regex})
        yield from _given("lark", **{"structured_outputs.choice": _alternatives(self.choice)})
        yield from _given("lark", **{"structured_outputs.grammar": self.grammar})
        if self.json_object:
            yield ANY_OBJECT


class StructureFields(RequestModel):
    """Fields for structured output: OpenAI's, and vLLM's aliases. At most one may be set."""

    response_format: ResponseFormat | None = about("At most one structure may be set.")
    regex: StructureText = about("The whole answer matches this regular expression.", "")
    grammar: StructureText = about("The answer follows this grammar, in llguidance's Lark.", "")
    guided_json: SchemaText = about("The answer is JSON of this JSON Schema.", "")
    guided_regex: StructureText = about("The same as regex.", "")
    guided_choice: ChoiceTexts | None = about("The answer is one of these texts.")
    guided_grammar: StructureText = about("The same as grammar.", "")
    structured_outputs: StructuredOutputs | None = about("The same in one object.")

    def structure(self) -> Structure | None:
        given = [
            *_given("json_schema", guided_json=self.guided_json),
            *_given("regex", regex=self.regex, guided_regex=self.guided_regex),
            *_given("lark", grammar=self.grammar, guided_grammar=self.guided_grammar),
            *_given("lark", guided_choice=_alternatives(self.guided_choice)),
            *(self.structured_outputs.structures() if self.structured_outputs else ()),
        ]
        if self.response_format and (structure := self.response_format.structure):
            given.append(structure)
        if len(given) > 1:
            raise InvalidRequest(
                "at most one of response_format, regex, grammar, guided_json, guided_regex,"
                " guided_choice, guided_grammar and structured_outputs may be set",
                field="response_format",
            )
        return given[0] if given else None


def _given(kind: Literal["json_schema", "regex", "lark"], **sources: str) -> Iterator[Structure]:
    """Yields the structures of the fields that are set, by the fields' names."""
    return (Structure(kind, source, name) for name, source in sources.items() if source)


def _alternatives(texts: Sequence[str] | None) -> str:
    """Returns Lark for one of the texts; "" without any."""
    return "start: " + " | ".join(map(json.dumps, texts)) if texts else ""


class StreamOptions(RequestModel):
    include_usage: bool = about("Send the usage in a last chunk without choices.", False)


class ChoicesRequest(StructureFields, GenerationRequest):
    """The fields that chats and completions share: they return choices."""

    max_tokens: TokenCount | None = about("Maximum tokens of one answer.")
    max_completion_tokens: TokenCount | None = about("Newer name of max_tokens; takes precedence.")
    n: int = about("Answers to each prompt.", 1, ge=1, le=bounds.MAX_ANSWERS)
    stop: Stops = about("The text is cut before the first of these.", ())
    stream_options: StreamOptions | None = about("Needs stream.")
    return_token_ids: bool = about("Return the ids of the answer's tokens in its choice.", False)
    user: ShortText = about("Ignored.", "")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _first(
        self,
        request_id: str,
        defaults: GenerationDefaults,
        prompt: Prompt,
        default_tokens: int | None = None,
        **fields: Any,
    ) -> Request:
        if self.stream_options and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", field="stream_options")
        wanted = self.max_completion_tokens or self.max_tokens
        return self._request(
            request_id,
            defaults,
            prompt,
            max_tokens=defaults.max_tokens or default_tokens if wanted is None else wanted,
            stop=self.stop,
            structure=self.structure(),
            n=self.n,
            **fields,
        )


_TokenPrompt = Annotated[tuple[int, ...], token_ids(bounds.MAX_PROMPT_TOKENS)]
OnePrompt = Annotated[
    Annotated[PromptText, Tag("<text>")] | Annotated[_TokenPrompt, Tag("<tokens>")],
    Discriminator(lambda value: "<tokens>" if isinstance(value, list) else "<text>"),
]
_SomeText = Annotated[str, Field(min_length=1)]
_SomeTokens = Annotated[list[TokenId], Field(min_length=1)]
_PromptInput = (
    _SomeText
    | _SomeTokens
    | Annotated[list[_SomeText | _SomeTokens], Field(min_length=1, max_length=MAX_INPUTS)]
)


def _as_prompts(value: object) -> object:
    if not isinstance(value, str | list):
        raise invalid(
            f"must be a string, a list of token ids, or a list of either, not {shown(value)}"
        )
    several = isinstance(value, list) and (not value or isinstance(value[0], str | list))
    return value if several else [value]


Prompts = Annotated[
    list[OnePrompt],
    Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True),
    BeforeValidator(_as_prompts, json_schema_input_type=_PromptInput),
]


class CompletionRequest(ChoicesRequest):
    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = about(
        "Maximum tokens of one answer. 0, with echo or prompt_logprobs, only scores the prompt."
    )
    add_special_tokens: bool = about("Add the model's special tokens to a text.", True)
    echo: bool = about(
        "Begin each answer with its prompt, and its logprobs with the prompt's.", False
    )
    logprobs: TopLogprobs | None = about("Return log probabilities, with this many alternatives.")
    prompt_logprobs: TopLogprobs | None = about("The same for the prompt's tokens.")

    unserved: ClassVar[dict[str, Unserved]] = {
        **ChoicesRequest.unserved,
        "best_of": Unserved("choosing the best of several answers", (1,)),
        "suffix": Unserved("text after the answer", ("",)),
    }

    def requests(self, request_id: str, defaults: GenerationDefaults) -> tuple[Request, ...]:
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise InvalidRequest(
                f"prompts times n must be at most {MAX_CHOICES} answers", field="prompt"
            )
        scores = (self.prompt_logprobs, self.logprobs if self.echo else None)
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest("max_tokens 0 needs echo or prompt_logprobs", field="max_tokens")
        request = self._first(
            request_id,
            defaults,
            self.prompt[0],
            DEFAULT_TOKENS,
            add_special_tokens=self.add_special_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=max((each for each in scores if each is not None), default=None),
        )
        others = (
            dataclasses.replace(request, prompt=prompt, sampling=self._sampling(defaults))
            for prompt in self.prompt[1:]
        )
        return request, *others

"""The fields that chats and completions share, and the body of /v1/completions."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Discriminator, Field, Tag

from baton.core import bounds
from baton.core.bounds import MAX_INPUTS
from baton.core.errors import InvalidRequest
from baton.core.generation_defaults import GenerationDefaults
from baton.core.types import Prompt, Request
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
from baton.router.edges.http.structure_fields import StructureFields

DEFAULT_TOKENS = 16
"""The API's own default of /v1/completions."""

MAX_CHOICES = MAX_INPUTS
"""Prompts times answers to each."""


class StreamOptions(RequestModel):
    include_usage: bool = about("Send the usage in a last chunk without choices.", False)


class ChoicesRequest(StructureFields, GenerationRequest):
    """The fields that chats and completions share: they return choices."""

    max_tokens: TokenCount | None = about("The most tokens of one answer.")
    max_completion_tokens: TokenCount | None = about("The newer max_tokens; takes precedence.")
    n: int = about("Answers to each prompt.", 1, ge=1, le=bounds.MAX_ANSWERS)
    stop: Stops = about("The text is cut before the first of these.", ())
    stream_options: StreamOptions | None = about("Only together with stream.")
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
        "The most tokens of one answer; 0, with echo or prompt_logprobs, scores the prompt."
    )
    add_special_tokens: bool = about("Give a text the model's special tokens.", True)
    echo: bool = about("Begin each answer with its prompt, and logprobs with its tokens'.", False)
    logprobs: TopLogprobs | None = about("Return log probabilities, with this many alternatives.")
    prompt_logprobs: TopLogprobs | None = about("The same for the prompt's tokens.")

    unserved: ClassVar[dict[str, Unserved]] = {
        **ChoicesRequest.unserved,
        "best_of": Unserved("a choice among more answers than are returned", (1,)),
        "suffix": Unserved("text after the answer", ("",)),
    }

    def requests(self, request_id: str, defaults: GenerationDefaults) -> tuple[Request, ...]:
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise InvalidRequest(
                f"prompts times n must be at most {MAX_CHOICES} answers", field="prompt"
            )
        echoed = self.logprobs if self.echo else None
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest("max_tokens 0 needs echo or prompt_logprobs", field="max_tokens")
        request = self._first(
            request_id,
            defaults,
            self.prompt[0],
            DEFAULT_TOKENS,
            add_special_tokens=self.add_special_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=echoed if self.prompt_logprobs is None else self.prompt_logprobs,
        )
        others = (
            dataclasses.replace(request, prompt=prompt, sampling=self._sampling(defaults))
            for prompt in self.prompt[1:]
        )
        return request, *others

"""/v1/completions: prompts in, choices out."""

from __future__ import annotations

from core.errors import InvalidRequest
from core.types import Prompt, TextPrompt, TokenPrompt
from router.http.fields import (
    TOKEN_ID_SCHEMA,
    Flag,
    Json,
    Unserved,
    as_text,
    as_token_ids,
    wrong_type,
)
from router.http.generation import ANSWERS, Asked, read_asked
from router.parse import MAX_PROMPT_TOKENS

DEFAULT_MAX_TOKENS = 16
"""The API's own, however short."""

MAX_CHOICES = 128
"""Prompts times answers to each."""

MAX_PROMPT_CHARACTERS = 8_000_000

ECHO = Flag("echo", "Begin each answer with its prompt.")

UNSERVED = (
    Unserved("best_of", "a choice among more answers than are returned", (1,)),
    Unserved("suffix", "text after the answer", ("",)),
)


class CompletionsApi:
    prompt_field = "prompt"
    id_prefix = "cmpl-"
    whole = chunk = "text_completion"

    def read(self, body: Json, request_id: str) -> Asked:
        for field in UNSERVED:
            field.check(body)
        prompts = read_prompts(body.get("prompt"))
        if len(prompts) * (ANSWERS.of(body) or 1) > MAX_CHOICES:
            raise InvalidRequest(
                f"prompts times n must be at most {MAX_CHOICES} answers", field="prompt"
            )
        return read_asked(
            body, request_id, prompts, max_tokens=DEFAULT_MAX_TOKENS, echo=ECHO.of(body)
        )

    def choice(self, index: int, text: str, finish: str) -> Json:
        return self.delta(index, text, finish, first=True)

    def delta(self, index: int, text: str, finish: str | None, *, first: bool) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def read_prompts(prompt: object) -> list[Prompt]:
    """A string, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [_read_prompt(prompt)]
    if not isinstance(prompt, list):
        raise wrong_type("prompt", "a string, a list of token ids, or a list of either", prompt)
    if not prompt:
        raise InvalidRequest("prompt is empty", field="prompt")
    if not isinstance(prompt[0], str | list):
        return [_read_prompt(prompt)]
    return [_read_prompt(item) for item in prompt]


def _read_prompt(prompt: object) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(as_text(prompt, "prompt", MAX_PROMPT_CHARACTERS))
    return TokenPrompt(as_token_ids(prompt, "prompt", MAX_PROMPT_TOKENS))


_TOKENS_SCHEMA: Json = {"type": "array", "minItems": 1, "items": TOKEN_ID_SCHEMA}
_TEXT_SCHEMA: Json = {"type": "string", "minLength": 1}

PROMPT_SCHEMA: Json = {
    "anyOf": [
        _TEXT_SCHEMA,
        _TOKENS_SCHEMA,
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_CHOICES,
            "items": {"anyOf": [_TEXT_SCHEMA, _TOKENS_SCHEMA]},
        },
    ]
}

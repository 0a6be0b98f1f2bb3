"""/v1/completions: prompts in, choices out."""

from __future__ import annotations

from baton.core.bounds import MAX_PROMPT_TOKENS, MAX_TOP_LOGPROBS
from baton.core.errors import InvalidRequest
from baton.core.types import Prompt, TextPrompt, TokenPrompt
from baton.router.edges.http.answers import Piece
from baton.router.edges.http.fields import (
    TOKEN_ID_SCHEMA,
    Field,
    Flag,
    Integer,
    Json,
    Unserved,
    as_text,
    as_token_ids,
    wrong_type,
)
from baton.router.edges.http.generation import ANSWERS, Asked, read_asked
from baton.router.edges.http.logprobs import completion_logprobs, prompt_logprobs

DEFAULT_MAX_TOKENS = 16
"""The API's own, however short."""

MAX_CHOICES = 128
"""Prompts times answers to each."""

MAX_PROMPT_CHARACTERS = 8_000_000

ECHO = Flag("echo", "Begin each answer with its prompt, and logprobs with those of its tokens.")
LOGPROBS = Integer(
    "logprobs",
    "Tell how likely each token of the answer was, and so many of the likeliest.",
    0,
    MAX_TOP_LOGPROBS,
)
PROMPT_LOGPROBS = Integer(
    "prompt_logprobs",
    "Tell how likely each token of the prompt was, and so many of the likeliest.",
    0,
    MAX_TOP_LOGPROBS,
)
READ: tuple[Field, ...] = (ECHO, LOGPROBS, PROMPT_LOGPROBS)

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
            body,
            request_id,
            prompts,
            max_tokens=DEFAULT_MAX_TOKENS,
            echo=ECHO.of(body),
            logprobs=LOGPROBS.of(body),
            prompt_logprobs=PROMPT_LOGPROBS.of(body),
        )

    def choice(self, piece: Piece) -> Json:
        return self.delta(piece)

    def delta(self, piece: Piece) -> Json:
        told: Json = {
            "index": piece.index,
            "text": piece.text,
            "logprobs": completion_logprobs(piece.scores, piece.offset),
            "finish_reason": piece.finish,
        }
        if piece.prompt_scores is not None:
            told["prompt_logprobs"] = prompt_logprobs(piece.prompt_scores)
        return told


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

"""Log probabilities with the text of the tokens that they are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.types import TokenLogprobs
from router.text import Text


@dataclass(frozen=True, slots=True)
class TokenScore:
    token_id: int
    # What the token stands for: UTF-8, maybe half a character.
    data: bytes
    logprob: float

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer, and the likeliest in its place, best first."""

    chosen: TokenScore
    top: tuple[TokenScore, ...]


def scored_tokens(
    text: Text, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[ScoredToken]:
    """Empty where nobody asked."""
    if not logprobs:
        return []
    return [_scored(text, token, each) for token, each in zip(token_ids, logprobs, strict=True)]


def _scored(text: Text, token: int, logprobs: TokenLogprobs) -> ScoredToken:
    likeliest = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    return ScoredToken(
        TokenScore(token, text.token_bytes(token), logprobs.logprob),
        tuple(TokenScore(each, text.token_bytes(each), logprob) for each, logprob in likeliest),
    )

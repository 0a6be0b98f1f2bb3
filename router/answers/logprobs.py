"""Log probabilities with the text of the tokens that they are of."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.types import Logprobs
from baton.router.answers.answer_events import ScoredToken, TokenScore
from baton.router.prompts.text import Text


def scored_tokens(
    text: Text, token_ids: Sequence[int], logprobs: Sequence[Logprobs]
) -> list[ScoredToken]:
    """Empty where nobody asked."""
    if not logprobs:
        return []
    return [_scored(text, token, each) for token, each in zip(token_ids, logprobs, strict=True)]


def scored_prompt(
    text: Text, prompt: Sequence[int], logprobs: Sequence[Logprobs]
) -> list[ScoredToken]:
    """Of the whole prompt, of which `logprobs` tell from the second token on."""
    first = ScoredToken(TokenScore(prompt[0], text.token_bytes(prompt[0]), None), ())
    return [first, *scored_tokens(text, prompt[1:], logprobs)]


def _scored(text: Text, token: int, logprobs: Logprobs) -> ScoredToken:
    likeliest = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    return ScoredToken(
        TokenScore(token, text.token_bytes(token), logprobs.logprob),
        tuple(TokenScore(each, text.token_bytes(each), logprob) for each, logprob in likeliest),
    )

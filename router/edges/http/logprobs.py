"""Log probabilities as the two endpoints tell them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from baton.router.answers.answer_events import ScoredToken, TokenScore
from baton.router.edges.http.fields import Json
from baton.router.edges.http.schemas import exact, list_of, or_null


def chat_logprobs(scores: Sequence[ScoredToken] | None) -> Json | None:
    if scores is None:
        return None
    content = [{**_told(each.chosen), "top_logprobs": [*map(_told, each.top)]} for each in scores]
    return {"content": content, "refusal": None}


def _told(score: TokenScore) -> Json:
    return {"token": score.text, "logprob": score.logprob, "bytes": list(score.data)}


def completion_logprobs(scores: Sequence[ScoredToken] | None, offset: int) -> Json | None:
    """`offset` is where the text of the first token begins: below 0 for a prompt whose first
    token is not part of its text."""
    if scores is None:
        return None
    lengths = (len(each.chosen.text) for each in scores)
    return {
        "tokens": [each.chosen.text for each in scores],
        "token_logprobs": [each.chosen.logprob for each in scores],
        "top_logprobs": [_by_text(each) for each in scores],
        "text_offset": [max(0, each) for each in accumulate(lengths, initial=offset)][:-1],
    }


def prompt_logprobs(scores: Sequence[ScoredToken]) -> list[Json | None]:
    """By token id, as other servers tell them; nothing of the first token."""
    return [_by_id(each) for each in scores]


def _by_id(scored: ScoredToken) -> Json | None:
    if scored.chosen.logprob is None:
        return None
    told: Json = {}
    for rank, score in enumerate((*scored.top, scored.chosen)):
        known = rank + 1 if rank < len(scored.top) else None
        told.setdefault(
            str(score.token_id),
            {"logprob": score.logprob, "rank": known, "decoded_token": score.text},
        )
    return told


def _by_text(scored: ScoredToken) -> Json | None:
    """The likeliest tokens and always the chosen one; of tokens that read alike, the likeliest."""
    if scored.chosen.logprob is None:
        return None
    told: Json = {}
    for score in (*scored.top, scored.chosen):
        told.setdefault(score.text, score.logprob)
    return told


_TOKEN: Json = {
    "token": {"type": "string"},
    "logprob": {"type": "number"},
    "bytes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}},
}


_RANKED = exact(
    {
        "logprob": {"type": "number"},
        "rank": {"type": ["integer", "null"]},
        "decoded_token": {"type": "string"},
    }
)
PROMPT_SCHEMA = list_of(or_null({"type": "object", "additionalProperties": _RANKED}))

_SCORED = exact({**_TOKEN, "top_logprobs": list_of(exact(_TOKEN))})
_TOP: Json = {"type": "object", "additionalProperties": {"type": "number"}}

CHAT_SCHEMA = or_null(exact({"content": list_of(_SCORED), "refusal": {"type": "null"}}))
COMPLETION_SCHEMA = or_null(
    exact(
        {
            "tokens": list_of({"type": "string"}),
            "token_logprobs": list_of({"type": ["number", "null"]}),
            "top_logprobs": list_of(or_null(_TOP)),
            "text_offset": list_of({"type": "integer"}),
        }
    )
)

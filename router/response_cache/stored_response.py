"""A response as stores keep it: the tokens of its answers, and when they were made."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from baton.core.wire import finish_from, finish_to, logprobs_from, logprobs_to
from baton.router.answers.answer import CachedAnswer
from baton.router.requests.attempt import Tokens
from baton.router.response_cache.cache_store import StoreFailed
from baton.v1 import responses_pb2, timing_pb2


@dataclass(frozen=True, slots=True)
class FoundResponse:
    answers: list[CachedAnswer]
    cache: timing_pb2.ResponseCache
    question: str = ""  # that was asked, where it was kept


def encode(answers: Sequence[CachedAnswer], question: str = "") -> bytes:
    response = responses_pb2.CachedResponse(
        made_at=time.time(), answers=map(_to, answers), question=question
    )
    return response.SerializeToString()


def decode(value: bytes, seconds: float, similarity: float | None = None) -> FoundResponse | None:
    """None for a response older than `seconds`. `similarity` is that of the question that found
    it; None where the request is the same. Raises StoreFailed for a damaged value."""
    try:
        response = responses_pb2.CachedResponse.FromString(value)
        answers = [*map(_from, response.answers)]
    except (DecodeError, KeyError) as error:  # the last: of a version to come
        raise StoreFailed("a response cannot be decoded") from error
    age = max(0.0, time.time() - response.made_at)
    if age > seconds:
        return None
    kind = "exact" if similarity is None else "semantic"
    cache = timing_pb2.ResponseCache(kind=kind, age_seconds=age, similarity=similarity)
    return FoundResponse(answers, cache, response.question)


def _to(answer: CachedAnswer) -> responses_pb2.CachedAnswer:
    tokens = answer.tokens
    return responses_pb2.CachedAnswer(
        token_ids=tokens.token_ids,
        finish_reason=finish_to(tokens.finish),
        cached_tokens=tokens.cached_tokens,
        fetched_tokens=tokens.fetched_tokens,
        logprobs=map(logprobs_to, tokens.logprobs),
        prompt_logprobs=map(logprobs_to, tokens.prompt_logprobs),
        call_ids=answer.call_ids,
        guessed_tokens=tokens.guessed,
        accepted_tokens=tokens.accepted,
    )


def _from(message: responses_pb2.CachedAnswer) -> CachedAnswer:
    tokens = Tokens(
        list(message.token_ids),
        finish_from(message.finish_reason),
        message.cached_tokens,
        tuple(map(logprobs_from, message.logprobs)),
        message.fetched_tokens,
        tuple(map(logprobs_from, message.prompt_logprobs)),
        guessed=message.guessed_tokens,
        accepted=message.accepted_tokens,
    )
    return CachedAnswer(tokens, list(message.call_ids))

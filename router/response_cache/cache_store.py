"""A store for cached responses (bytes by key, with an age limit), and the encoding of a response:
the tokens of its answers and their time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from google.protobuf.message import DecodeError

from baton.core.wire import finish_from, finish_to, logprobs_from, logprobs_to
from baton.router.answers.answer import CachedAnswer
from baton.router.requests.attempt import Tokens
from baton.v1 import responses_pb2, timing_pb2


class ResponseKey(NamedTuple):
    """Names a response; both parts are digests."""

    tenant: bytes
    request: bytes


class StoreFailed(Exception):
    """A store did not answer in time, refused a value or returned a damaged one."""


class CacheStore(Protocol):
    """Values expire by themselves. Any call may raise StoreFailed, without a long wait."""

    @property
    def used_bytes(self) -> int:
        """Memory used in this process."""

    @property
    def reply_seconds(self) -> float:
        """Moving average of the time of `get`."""

    async def get(self, key: ResponseKey) -> bytes | None: ...

    async def put(self, key: ResponseKey, value: bytes) -> None: ...

    async def clear(self, tenant: bytes | None) -> int:
        """Deletes one tenant's values, or all. Returns their number."""

    async def close(self) -> None: ...


ENTRY_BYTES = 300
"""Memory of an entry beside its value."""


class MemoryStore:
    """A store in this process. Evicts the least recently used values beyond the budget."""

    reply_seconds = 0.0

    def __init__(self, budget: int, seconds: float) -> None:
        self._budget = budget
        self._seconds = seconds
        self._values: OrderedDict[ResponseKey, tuple[bytes, float]] = OrderedDict()
        self.used_bytes = 0

    async def get(self, key: ResponseKey) -> bytes | None:
        value, expires = self._values.get(key, (None, 0.0))
        if value is None:
            return None
        if expires < time.monotonic():
            self._drop(key)
            return None
        self._values.move_to_end(key)
        return value

    async def put(self, key: ResponseKey, value: bytes) -> None:
        size = len(value) + ENTRY_BYTES
        if size > self._budget:
            raise StoreFailed(f"a response of {size} bytes exceeds the budget")
        if key in self._values:
            self._drop(key)
        while self.used_bytes + size > self._budget:
            self._drop(next(iter(self._values)))
        self._values[key] = value, time.monotonic() + self._seconds
        self.used_bytes += size

    async def clear(self, tenant: bytes | None) -> int:
        keys = [key for key in self._values if tenant in (None, key.tenant)]
        for key in keys:
            self._drop(key)
        return len(keys)

    async def close(self) -> None:
        self._values.clear()

    def _drop(self, key: ResponseKey) -> None:
        value, _ = self._values.pop(key)
        self.used_bytes -= len(value) + ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class FoundResponse:
    answers: list[CachedAnswer]
    cache: timing_pb2.ResponseCache
    question: str = ""  # the question that was asked, if it was kept


def encode(answers: Sequence[CachedAnswer], question: str = "") -> bytes:
    response = responses_pb2.CachedResponse(
        made_at=time.time(), answers=map(_to_proto, answers), question=question
    )
    return response.SerializeToString()


def decode(value: bytes, seconds: float, similarity: float | None = None) -> FoundResponse | None:
    """Decodes a response; returns None if it is older than `seconds`. `similarity` is that of its
    question, or None for the same request. Raises StoreFailed for a damaged value."""
    try:
        response = responses_pb2.CachedResponse.FromString(value)
        answers = [*map(_from_proto, response.answers)]
    except (DecodeError, KeyError) as error:  # KeyError: written by a later version
        raise StoreFailed("a response cannot be decoded") from error
    age = max(0.0, time.time() - response.made_at)
    if age > seconds:
        return None
    kind = "exact" if similarity is None else "semantic"
    cache = timing_pb2.ResponseCache(kind=kind, age_seconds=age, similarity=similarity)
    return FoundResponse(answers, cache, response.question)


def _to_proto(answer: CachedAnswer) -> responses_pb2.CachedAnswer:
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


def _from_proto(message: responses_pb2.CachedAnswer) -> CachedAnswer:
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

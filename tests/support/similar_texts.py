"""The response cache of a router, for questions whose similarity is known, without workers."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from waiting import until

from baton.core.config import CacheConfig
from baton.core.errors import Unavailable
from baton.core.types import AttemptKey, ChatPrompt, FinishReason, Message, Request, Sampling, Work
from baton.router.answers.answer import CachedAnswer
from baton.router.observe.metrics import CacheMetrics
from baton.router.requests.attempt import Tokens
from baton.router.response_cache.cached_responses import CachedResponses
from baton.router.response_cache.redis_store import RedisStore
from baton.router.response_cache.response_keys import response_key
from baton.router.response_cache.semantic_cache import Inquiry, SemanticCache

DIMENSIONS = 32
MODEL, EMBEDDER = b"model", b"embedder"


@functools.cache
def vector(text: str) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The first word is the subject. Texts of one have a cosine of 0.98 or more."""
    subject, *rest = text.split()
    base = np.random.default_rng(list(subject.encode())).normal(size=DIMENSIONS)
    base /= np.linalg.norm(base)
    change = np.random.default_rng(list(" ".join(rest).encode())).normal(size=DIMENSIONS)
    change /= 10 * np.linalg.norm(change)
    return np.asarray(base + (change if rest else 0.0), np.float32)


async def embed(text: str, request: Request) -> bytes:
    if text.startswith("unknown"):
        raise Unavailable("no workers are ready")
    return vector(text).tobytes()


async def are_same(earlier: str, question: str, request: Request) -> bool:
    """Questions about Mars are others, and none is known about Venus."""
    if "Venus" in question:
        await asyncio.Event().wait()
    return "Mars" not in question


class SemanticRouter:
    """A router's cache, and one request's way through it."""

    def __init__(self, url: str, **config: object) -> None:
        cache = CacheConfig(responses="semantic", redis=url, semantic_similarity=0.9)
        cache = dataclasses.replace(cache, **config)  # type: ignore[arg-type]
        self.metrics = CacheMetrics()
        self.store = RedisStore(url, cache.responses_seconds)
        semantic = SemanticCache(self.store, cache, EMBEDDER, self.metrics)
        self.semantic = semantic
        self.responses = CachedResponses(
            self.store, cache.responses_seconds, self.metrics, semantic
        )

    async def connected(self) -> None:
        async def holds() -> bool:
            return self.store.replies

        await until(holds)

    def inquiry(self, request: Request, tokens: list[int]) -> Inquiry:
        work = Work(AttemptKey("id", 1), tokens, Sampling(), 8, frozenset({0}))
        key = response_key(request, work, MODEL)
        assert key is not None
        found = self.semantic.inquiry(request, work, MODEL, key, embed, are_same)
        assert found is not None
        return found

    async def find(self, text: str, tenant: str = "alice", least: float = 0.0) -> int | None:
        """The answer's first token."""
        found = await self.inquiry(ask(text, tenant, least), [1]).find()
        return found.answers[0].tokens.token_ids[0] if found else None

    async def keep(self, text: str, answer: int, tenant: str = "alice") -> None:
        request, tokens = ask(text, tenant), [*text.encode()]
        inquiry = self.inquiry(request, tokens)
        await self.keep_with(inquiry, answer)

    async def keep_with(self, inquiry: Inquiry, answer: int) -> None:
        made = CachedAnswer(Tokens([answer], FinishReason.STOP), [])
        self.responses.keep(inquiry._key, [made], inquiry)
        await self.responses.settle()

    def count(self, result: str) -> float:
        return float(self.metrics.semantic_lookups.labels(result=result)._value.get())

    def verifications(self, result: str) -> float:
        return float(self.metrics.semantic_verifications.labels(result=result)._value.get())


def ask(text: str, tenant: str, least: float | None = 0.0) -> Request:
    chat = ChatPrompt((Message("system", "Be brief."), Message("user", text)))
    return Request("id", chat, Sampling(), 8, tenant=tenant, semantic_similarity=least)


@asynccontextmanager
async def opened(url: str, **config: object) -> AsyncIterator[SemanticRouter]:
    cache = SemanticRouter(url, **config)
    try:
        await cache.connected()
        yield cache
    finally:
        await cache.responses.close()

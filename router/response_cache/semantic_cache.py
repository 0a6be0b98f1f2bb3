"""The semantic cache: answers a request with the answer to a similar question, if the caller
allows it.

An Inquiry is one request's search. The prefill pool embeds its question once, for the search and to
add the question afterwards. In shadow mode (shadow.py) the search runs after the request has been
computed. A hit may have to be verified (verification.py).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine

from baton.core.config import CacheConfig
from baton.core.errors import BatonError
from baton.core.types import Request, Work
from baton.router.observe.metrics import CacheMetrics
from baton.router.response_cache.cache_store import FoundResponse, ResponseKey, StoreFailed, decode
from baton.router.response_cache.redis_store import RedisStore
from baton.router.response_cache.response_keys import Question, question_of
from baton.router.response_cache.shadow import FLOOR, Computed, Shadow
from baton.router.response_cache.similar_questions import SimilarQuestions
from baton.router.response_cache.verification import Verification
from baton.v1 import timing_pb2

EMBED_SECONDS = 5.0
"""Time limit for embedding a question."""

Embed = Callable[[str, Request], Coroutine[None, None, bytes]]
"""Returns a text's float32 vector, on behalf of a request. Raises BatonError."""
AreSame = Callable[[str, str, Request], Coroutine[None, None, bool]]
"""Returns whether two questions ask the same, on behalf of a request. Raises BatonError."""


class SemanticCache:
    def __init__(
        self, store: RedisStore, config: CacheConfig, embedder: bytes, metrics: CacheMetrics
    ) -> None:
        self.store = store
        self.questions = SimilarQuestions(store, config.semantic_questions)
        self.seconds = config.responses_seconds
        self.metrics = metrics
        self.shadow = Shadow(store) if config.semantic == "shadow" else None
        self._least = config.semantic_similarity
        self._verify_seconds = config.semantic_verify_seconds
        self._embedder = embedder

    def inquiry(
        self,
        request: Request,
        work: Work,
        model: bytes,
        key: ResponseKey,
        embed: Embed,
        are_same: AreSame,
    ) -> Inquiry | None:
        """Returns None if the request may only get an answer to the same request, or if the caller
        does not allow others. Shadow mode needs no permission."""
        allowed = request.semantic_similarity
        if allowed is None and not self.shadow:
            return None
        question = question_of(request, work, model, self._embedder)
        if question is None:
            return None
        least = max(allowed or 0.0, self._least)
        seconds, verification = self._verify_seconds, None
        if seconds:
            verification = Verification(lambda one, other: are_same(one, other, request), seconds)
        embed_it = functools.partial(embed, question.text, request)
        return Inquiry(self, question, key, least, embed_it, verification)


class Inquiry:
    def __init__(
        self,
        cache: SemanticCache,
        question: Question,
        key: ResponseKey,
        least: float,
        embed: Callable[[], Coroutine[None, None, bytes]],
        verification: Verification | None,
    ) -> None:
        """`key` is the request's own key, `least` the least similarity of a hit."""
        self._cache = cache
        self._question = question
        self._key = key
        self._least = least
        self._embed = embed
        self._embedding: asyncio.Task[bytes] | None = None
        self._verification = verification
        self.held_seconds = 0.0  # time for which the first token was held back
        self.computed: Computed | None = None  # set before `finish`, for shadow mode

    @property
    def answers(self) -> bool:
        """True if a hit may answer the request: not in shadow mode."""
        return self._cache.shadow is None

    @property
    def kept_question(self) -> str:
        """The question to store with the answer; empty unless hits are verified."""
        return self._question.text if self._verification else ""

    @property
    def refused(self) -> timing_pb2.RefusedHit | None:
        """The hit that was not confirmed, if any."""
        return self._verification.refused if self._verification else None

    @property
    def hold_seconds(self) -> float:
        """Seconds for which the first token may still be held back; 0 unless a hit is being
        verified."""
        return self._verification.seconds_left if self._verification else 0.0

    def note_held(self, seconds: float) -> None:
        self.held_seconds = seconds
        self._cache.metrics.semantic_held.observe(seconds)

    def begin(self) -> None:
        """Starts embedding the question."""
        if self._embedding is None:
            self._embedding = asyncio.create_task(self._embed_question())

    async def find(self) -> FoundResponse | None:
        """Returns the answer to the most similar question; None also after a failure."""
        result, found = "late", None  # if cancelled, since the first token has come
        try:
            near = await self._find()
            found = near if near and await self._confirms(near) else None
            result = "hit" if found else "refused" if near else "miss"
        except StoreFailed:
            result = "failed"
        finally:
            self._cache.metrics.semantic_lookups.labels(result=result).inc()
        return found

    async def finish(self, *, stored: bool) -> None:
        """Adds the question of a computed request if its response was stored."""
        if not stored:
            self.cancel()
            return
        result = "failed"
        try:
            await self._record_shadow()
            await self._cache.questions.add(self._question, await self._vector(), self._key)
            result = "stored"
        except StoreFailed:
            pass
        self._cache.metrics.semantic_stores.labels(result=result).inc()

    def cancel(self) -> None:
        if self._embedding:
            self._embedding.cancel()

    async def _find(self) -> FoundResponse | None:
        cache = self._cache
        if not cache.store.replies:
            raise StoreFailed("Redis does not answer")
        vector = await self._vector()
        found = await cache.questions.find(self._question, vector, self._least)
        return decode(found.value, cache.seconds, found.similarity) if found else None

    async def _confirms(self, found: FoundResponse) -> bool:
        """Asks the served model to confirm a hit. Returns True if hits are not verified."""
        verification, similarity = self._verification, found.cache.similarity
        if verification is None:
            return True
        same = await verification.confirms(found.question, self._question.text, similarity)
        found.cache.verified = same
        refused = verification.refused
        result = "confirmed" if same else "denied" if refused and refused.denied else "failed"
        self._cache.metrics.semantic_verifications.labels(result=result).inc()
        return same

    async def _record_shadow(self) -> None:
        """In shadow mode, records what would have been answered."""
        cache, computed = self._cache, self.computed
        if cache.shadow is None or computed is None:
            return
        near = await cache.questions.find(self._question, await self._vector(), FLOOR)
        found = decode(near.value, cache.seconds, near.similarity) if near else None
        if near is None or found is None or near.key == self._key:
            await cache.shadow.record_miss()
        else:
            asked = self._verification is not None and near.similarity >= self._least
            confirmed = await self._confirms(found) if asked else None
            tokens = found.answers[0].tokens.token_ids
            await cache.shadow.record(near.similarity, tokens, computed, confirmed)

    async def _vector(self) -> bytes:
        """Returns the question's vector, embedding it first if necessary. Raises StoreFailed if
        that fails."""
        self.begin()
        assert self._embedding
        # Shielded, since the vector is needed after a search is cancelled.
        vector = await asyncio.shield(self._embedding)
        if not vector:
            raise StoreFailed("the question was not embedded")
        return vector

    async def _embed_question(self) -> bytes:
        """Returns the vector, or b"" after a failure: an exception might never be retrieved."""
        try:
            async with asyncio.timeout(EMBED_SECONDS):
                return await self._embed()
        except (BatonError, TimeoutError):
            return b""

"""The exact response cache: which requests it answers, under which key, and how.

A request's key is a digest of everything that its answers depend on, and of who asks: another
tenant, or another cache salt, has another key, so no look-up can find its answers. Only requests
whose answers are the same each time have a key: greedy ones, and those with the caller's seed.

A look-up in memory takes no time. One in Redis runs beside computing, until a response is found or
the first token has come. While Redis replies within HEAD_START_SECONDS it gets a head start: most
hits then cost no worker anything, and a miss costs less than that.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeVar

from google.protobuf.message import DecodeError

from baton.core.config import CacheConfig
from baton.core.errors import InvalidConfig, Unavailable
from baton.core.tasks import cancel_all
from baton.core.types import Caching, ChatPrompt, Request, Work
from baton.core.wire import finish_from, finish_to, logprobs_from, logprobs_to
from baton.router.answers.answer import CachedAnswer
from baton.router.answers.answer_events import AnswerEvent, Emit
from baton.router.observe.metrics import RouterMetrics
from baton.router.requests.attempt import Tokens
from baton.router.response_cache.cache_store import (
    CacheStore,
    MemoryStore,
    ResponseKey,
    StoreFailed,
)
from baton.router.response_cache.redis_store import RedisStore, ResponseCipher
from baton.v1 import inference_pb2, responses_pb2, timing_pb2

HEAD_START_SECONDS = 0.001
"""Of a look-up before computing begins. uvloop's timers are no finer."""

_DIGEST_BYTES = 32

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class FoundResponse:
    answers: list[CachedAnswer]
    cache: timing_pb2.ResponseCache


class CachedResponses:
    def __init__(self, store: CacheStore, seconds: float, metrics: RouterMetrics) -> None:
        self._store = store
        self._seconds = seconds
        self._metrics = metrics
        self._storing: set[asyncio.Task[None]] = set()
        metrics.response_bytes.set_function(lambda: store.used_bytes)

    @classmethod
    def open(cls, config: CacheConfig, metrics: RouterMetrics) -> CachedResponses | None:
        """None when the configuration wants no cache."""
        if config.responses == "off":
            return None
        if config.redis_key and not config.redis:
            raise InvalidConfig("cache.redis_key needs cache.redis", field="cache.redis_key")
        seconds = config.responses_seconds
        cipher = ResponseCipher.load(config.redis_key) if config.redis_key else None
        store: CacheStore = MemoryStore(config.responses_memory, seconds)
        if config.redis:
            store = RedisStore(config.redis, seconds, cipher)
        return cls(store, seconds, metrics)

    @property
    def head_start(self) -> float:
        """Seconds that a request may wait for its look-up. A slow store gets none: each miss would
        wait that long."""
        fast = self._store.reply_seconds < HEAD_START_SECONDS
        return HEAD_START_SECONDS if fast else 0.0

    async def find(self, key: ResponseKey) -> FoundResponse | None:
        """None too where the store fails."""
        result, found = "miss", None
        try:
            value = await self._store.get(key)
            found = self._decode(value) if value is not None else None
            result = "hit" if found else "miss"
        except (StoreFailed, DecodeError, KeyError):  # the last: of a version to come
            result = "failed"
        self._metrics.response_lookups.labels(result=result).inc()
        return found

    def keep(self, key: ResponseKey, answers: Sequence[CachedAnswer]) -> None:
        """Stores all answers to a request, in the background."""
        response = responses_pb2.CachedResponse(made_at=time.time(), answers=map(_to, answers))
        task = asyncio.create_task(self._put(key, response.SerializeToString()))
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    async def clear(self, tenant: str | None) -> int:
        """Deletes a tenant's responses, or all. Returns how many."""
        try:
            return await self._store.clear(None if tenant is None else tenant_digest(tenant))
        except StoreFailed as error:
            raise Unavailable(f"the response cache cannot be cleared: {error}") from error

    async def settle(self) -> None:
        """Waits until all is stored, or failed to be."""
        await asyncio.gather(*self._storing)

    async def close(self) -> None:
        await self.settle()
        await self._store.close()

    async def _put(self, key: ResponseKey, value: bytes) -> None:
        try:
            await self._store.put(key, value)
            result = "stored"
        except StoreFailed:
            result = "failed"
        self._metrics.response_stores.labels(result=result).inc()

    def _decode(self, value: bytes) -> FoundResponse | None:
        response = responses_pb2.CachedResponse.FromString(value)
        age = max(0.0, time.time() - response.made_at)
        if age > self._seconds:
            return None
        cache = timing_pb2.ResponseCache(kind="exact", age_seconds=age)
        return FoundResponse([*map(_from, response.answers)], cache)


def response_key(request: Request, work: Work, model: bytes) -> ResponseKey | None:
    """None where the next answers may differ, the model is unknown, or the caller wants none to be
    kept."""
    sampling = work.sampling
    repeatable = (sampling.greedy or request.seeded) and request.pooling is None
    if not repeatable or not model or request.caching is Caching.NEVER:
        return None
    chat = request.prompt if isinstance(request.prompt, ChatPrompt) else None
    decisive = (
        request.cache_salt,
        request.n,
        request.max_tokens == 0,
        request.stop,
        request.skip_special_tokens,
        [tool.name for tool in chat.callable_tools] if chat else None,
        # Greedy answers are the same for all seeds.
        replace(sampling, seed=0) if sampling.greedy else sampling,
        work.max_tokens,
        sorted(work.stop_token_ids),
        work.logprobs,
        work.prompt_logprobs,
        work.grammar,
    )
    tenant, model = tenant_digest(request.tenant), model + work.adapter_digest
    digest = blake2b(digest_size=_DIGEST_BYTES, person=b"baton-response")
    for part in (tenant, model, repr(decisive).encode(), array("I", work.prompt_tokens).tobytes()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return ResponseKey(tenant, digest.digest())


def tenant_digest(tenant: str) -> bytes:
    return blake2b(tenant.encode(), digest_size=16, person=b"baton-tenant").digest()


async def found_or_computed(
    looking: Coroutine[None, None, FoundResponse | None],
    compute: Callable[[Emit], Coroutine[None, None, Result]],
    emit: Emit,
    head_start: float,
) -> FoundResponse | Result:
    """A response that is found before the first token is computed, or the computed one."""
    look_up = asyncio.ensure_future(looking)
    computing: asyncio.Future[Result] | None = None
    try:
        await asyncio.wait((look_up,), timeout=head_start)
        gate = _Gate(emit)
        if not look_up.done():
            computing = asyncio.ensure_future(compute(gate.emit))
            await asyncio.wait((look_up, computing), return_when=asyncio.FIRST_COMPLETED)
        if look_up.done() and not gate.is_open and (found := look_up.result()):
            return found
        gate.open()
        return await (computing or compute(emit))
    finally:
        await cancel_all(*(task for task in (look_up, computing) if task))


class _Gate:
    """Holds Started back, which says where an answer is computed. The first token opens it."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held: list[AnswerEvent] = []
        self.is_open = False

    def emit(self, event: AnswerEvent) -> None:
        if not self.is_open:
            if isinstance(event, inference_pb2.Started):
                self._held.append(event)
                return
            self.open()
        self._emit(event)

    def open(self) -> None:
        self.is_open = True
        for event in self._held:
            self._emit(event)
        self._held.clear()


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
    )


def _from(message: responses_pb2.CachedAnswer) -> CachedAnswer:
    tokens = Tokens(
        list(message.token_ids),
        finish_from(message.finish_reason),
        message.cached_tokens,
        tuple(map(logprobs_from, message.logprobs)),
        message.fetched_tokens,
        tuple(map(logprobs_from, message.prompt_logprobs)),
    )
    return CachedAnswer(tokens, list(message.call_ids))

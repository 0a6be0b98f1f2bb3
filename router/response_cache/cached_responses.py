"""The response cache: finds and keeps responses, and lets look-ups race with computing.

A look-up in memory takes no time. One in Redis runs while the answer is computed, until a response
is found or the first token has come. While Redis replies within HEAD_START_SECONDS, a look-up gets
a head start: then most hits cost no worker anything, and a miss costs less than that. The search
for similar questions gets none: it begins after a miss, once the request is placed or waits for a
worker, so that it delays no miss. While a hit is verified, the first token is held back for a
limited time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol, TypeVar

from baton.core.config import CacheConfig
from baton.core.errors import InvalidConfig, NotServed, Unavailable
from baton.core.process import cancel_all
from baton.router.answers.answer import CachedAnswer
from baton.router.answers.answer_events import AnswerEvent, Emit
from baton.router.observe.metrics import CacheMetrics
from baton.router.response_cache.cache_store import (
    CacheStore,
    FoundResponse,
    MemoryStore,
    ResponseKey,
    StoreFailed,
    decode,
    encode,
)
from baton.router.response_cache.redis_store import RedisStore, ResponseCipher
from baton.router.response_cache.response_keys import tenant_digest
from baton.router.response_cache.semantic_cache import Inquiry, SemanticCache
from baton.router.response_cache.shadow import Shadow
from baton.v1 import cluster_pb2, inference_pb2

HEAD_START_SECONDS = 0.001
"""Head start of a look-up before computing begins. uvloop's timers are no finer."""

Result = TypeVar("Result")


class CachedResponses:
    def __init__(
        self,
        store: CacheStore,
        seconds: float,
        metrics: CacheMetrics,
        semantic: SemanticCache | None = None,
    ) -> None:
        self._store = store
        self._seconds = seconds
        self._metrics = metrics
        self.semantic = semantic
        self._storing: set[asyncio.Task[None]] = set()
        metrics.response_bytes.set_function(lambda: store.used_bytes)

    @classmethod
    def open(
        cls, config: CacheConfig, metrics: CacheMetrics, embedder: bytes = b""
    ) -> CachedResponses | None:
        """Opens the configured cache; returns None if it is off. `embedder` is the embedding
        model's digest, empty without one."""
        if config.responses == "off":
            return None
        _check(config, embedder)
        seconds = config.responses_seconds
        if not config.redis:
            return cls(MemoryStore(config.responses_memory, seconds), seconds, metrics)
        cipher = ResponseCipher.load(config.redis_key) if config.redis_key else None
        store = RedisStore(config.redis, seconds, cipher)
        wanted = config.responses == "semantic"
        semantic = SemanticCache(store, config, embedder, metrics) if wanted else None
        return cls(store, seconds, metrics, semantic)

    @property
    def shadow(self) -> Shadow | None:
        return self.semantic.shadow if self.semantic else None

    @property
    def head_start(self) -> float:
        """Seconds that a request waits for its look-up; 0 for a slow store, since each miss would
        wait so long."""
        fast = self._store.reply_seconds < HEAD_START_SECONDS
        return HEAD_START_SECONDS if fast else 0.0

    async def find(self, key: ResponseKey) -> FoundResponse | None:
        """Returns the response to the same request; None also if the store fails."""
        result, found = "miss", None
        try:
            value = await self._store.get(key)
            found = decode(value, self._seconds) if value is not None else None
            result = "hit" if found else "miss"
        except StoreFailed:
            result = "failed"
        self._metrics.response_lookups.labels(result=result).inc()
        return found

    def keep(
        self, key: ResponseKey, answers: Sequence[CachedAnswer], inquiry: Inquiry | None = None
    ) -> None:
        """Stores all answers to a request in the background; with an inquiry, also for similar
        questions."""
        value = encode(answers, inquiry.kept_question if inquiry else "")
        task = asyncio.create_task(self._put(key, value, inquiry))
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    async def clear(self, tenant: str | None) -> int:
        """Deletes a tenant's responses, or all. Returns their number."""
        try:
            return await self._store.clear(None if tenant is None else tenant_digest(tenant))
        except StoreFailed as error:
            raise Unavailable(f"the response cache cannot be cleared: {error}") from error

    async def report(
        self, false_hit_rate: float, same_answer: float
    ) -> cluster_pb2.SemanticReportResponse:
        """Reports what the semantic cache would have answered, in shadow mode."""
        if self.shadow is None:
            raise NotServed("this router records no shadow: cache.semantic is not shadow")
        try:
            return await self.shadow.report(false_hit_rate, same_answer)
        except StoreFailed as error:
            raise Unavailable(f"the report cannot be read: {error}") from error

    async def settle(self) -> None:
        """Waits until all pending stores are done or have failed."""
        await asyncio.gather(*self._storing)

    async def close(self) -> None:
        await self.settle()
        await self._store.close()

    async def _put(self, key: ResponseKey, value: bytes, inquiry: Inquiry | None) -> None:
        try:
            await self._store.put(key, value)
            result = "stored"
        except StoreFailed:
            result = "failed"
        self._metrics.response_stores.labels(result=result).inc()
        if inquiry:
            await inquiry.finish(stored=result == "stored")


def _check(config: CacheConfig, embedder: bytes) -> None:
    if config.redis_key and not config.redis:
        raise InvalidConfig("cache.redis_key needs cache.redis", field="cache.redis_key")
    if config.responses != "semantic":
        return
    if not config.redis:
        raise InvalidConfig("cache.responses: semantic needs cache.redis", field="cache.redis")
    if not embedder:
        raise InvalidConfig(
            "cache.responses: semantic needs an embedding_model", field="embedding_model"
        )


class Search(Protocol):
    """A search for an answer to a similar question."""

    async def find(self) -> FoundResponse | None: ...

    @property
    def hold_seconds(self) -> float:
        """Seconds for which the first token may still be held back; 0 unless a hit is being
        verified."""

    def note_held(self, seconds: float) -> None:
        """Notes how long the first token was held back."""


async def found_or_computed(
    looking: Coroutine[None, None, FoundResponse | None],
    compute: Callable[[Emit], Coroutine[None, None, Result]],
    emit: Emit,
    head_start: float,
    search: Search | None = None,
) -> FoundResponse | Result:
    """Returns a response that is found before the first token is emitted, or else the computed
    result. `search` runs after a miss, without a head start."""
    look_up = asyncio.ensure_future(looking)
    searching: asyncio.Future[FoundResponse | None] = look_up
    computing: asyncio.Future[Result] | None = None
    gate = _Gate(emit, search)
    try:
        await asyncio.wait((look_up,), timeout=head_start)
        if look_up.done() and (found := look_up.result()):
            return found
        if look_up.done() and search is None:
            return await compute(emit)
        # Computing begins before the search, which must not delay it.
        computing = asyncio.ensure_future(compute(gate.emit))
        if search:
            searching = asyncio.ensure_future(_found_or_searched(look_up, search, gate))
        ends = (searching, computing, gate.opened)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if searching.done() and not gate.is_open and (found := searching.result()):
            return found
        gate.open()
        if look_up.done():
            searching.cancel()  # the search is too late
        return await computing
    finally:
        gate.close()
        await cancel_all(*(task for task in (look_up, searching, computing) if task))


async def _found_or_searched(
    look_up: asyncio.Future[FoundResponse | None], search: Search, gate: _Gate
) -> FoundResponse | None:
    if found := await look_up:
        return found
    await asyncio.wait((gate.placed,), timeout=HEAD_START_SECONDS)
    return None if gate.is_open else await search.find()


class _Gate:
    """Holds back Started, which names the workers, until the first token. While a hit is verified,
    holds back tokens too."""

    def __init__(self, emit: Emit, search: Search | None) -> None:
        self._emit = emit
        self._search = search
        self._held: list[AnswerEvent] = []
        self._since = 0.0  # when the first held token came; 0 if none is held
        self._timer: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        self.placed: asyncio.Future[None] = loop.create_future()
        self.opened: asyncio.Future[None] = loop.create_future()

    @property
    def is_open(self) -> bool:
        return self.opened.done()

    def emit(self, event: AnswerEvent) -> None:
        if not self.placed.done():
            self.placed.set_result(None)
        if not self.is_open:
            if isinstance(event, inference_pb2.Started) or self._holds_tokens():
                self._held.append(event)
                return
            self.open()
        self._emit(event)

    def _holds_tokens(self) -> bool:
        if self._timer is None and self._search and (seconds := self._search.hold_seconds):
            self._since = time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(seconds, self.open)
        return self._timer is not None

    def open(self) -> None:
        if self.is_open:
            return
        self.close()
        self.opened.set_result(None)
        if self._since and self._search:
            self._search.note_held(time.monotonic() - self._since)
        for event in self._held:
            self._emit(event)
        self._held.clear()

    def close(self) -> None:
        """Cancels the timer."""
        if self._timer:
            self._timer.cancel()

"""The response cache's parts: keys, the race of a look-up with computing, the store in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

import pytest
from waiting import until

from baton.core.types import Adapter, AttemptKey, Caching, FinishReason, Request, Sampling, Work
from baton.router.answers.answer import CachedAnswer
from baton.router.answers.answer_events import AnswerDelta, AnswerEvent, Emit
from baton.router.observe.metrics import CacheMetrics
from baton.router.requests.attempt import Tokens
from baton.router.response_cache.cache_store import (
    ENTRY_BYTES,
    FoundResponse,
    MemoryStore,
    ResponseKey,
    StoreFailed,
)
from baton.router.response_cache.cached_responses import (
    HEAD_START_SECONDS,
    CachedResponses,
    found_or_computed,
)
from baton.router.response_cache.response_keys import response_key, tenant_digest
from baton.v1 import inference_pb2, responses_pb2, timing_pb2

REQUEST = Request("id", "text", Sampling(), 8, tenant="alice", cache_salt="alice:")
WORK = Work(AttemptKey("id", 1), [1, 2, 3], Sampling(), 8, frozenset({0}))


@pytest.mark.parametrize(
    ("request_change", "work_change"),
    [
        ({"tenant": "bob"}, {}),
        ({"cache_salt": "alice:salt"}, {}),
        ({"n": 2}, {}),
        ({"max_tokens": 0}, {}),
        ({"stop": ("x",)}, {}),
        ({"skip_special_tokens": False}, {}),
        ({}, {"prompt_tokens": [1, 2, 4]}),
        ({}, {"prompt_tokens": [1, 2]}),
        ({}, {"max_tokens": 9}),
        ({}, {"adapter": Adapter(b"digest", "/a")}),
        ({}, {"stop_token_ids": frozenset({0, 1})}),
        ({}, {"logprobs": 0}),
        ({}, {"prompt_logprobs": 0}),
        ({}, {"grammar": "{}"}),
        ({}, {"sampling": Sampling(repetition_penalty=1.1)}),
        ({}, {"sampling": Sampling(logit_bias=((1, 2.0),))}),
        ({"seeded": True}, {"sampling": Sampling(temperature=1.0, seed=3)}),
    ],
)
async def test_whatever_decides_an_answer_is_in_its_key(
    request_change: dict[str, Any], work_change: dict[str, Any]
) -> None:
    key = response_key(REQUEST, WORK, b"model")
    changed = response_key(
        dataclasses.replace(REQUEST, **request_change),
        dataclasses.replace(WORK, **work_change),
        b"model",
    )
    assert None not in (key, changed)
    assert changed != key
    assert response_key(REQUEST, WORK, b"another model") != key


async def test_ten_thousand_requests_of_twenty_tenants_cross_no_border() -> None:
    """Each tenant's answer to a question is a token of its own."""
    draw = random.Random(5)
    cache = CachedResponses(MemoryStore(2**24, 60.0), 60.0, CacheMetrics())
    hits = 0
    for _ in range(10_000):
        tenant, question = draw.randrange(20), draw.randrange(100)
        request = dataclasses.replace(REQUEST, tenant=f"tenant {tenant}", cache_salt="the same")
        work = dataclasses.replace(WORK, prompt_tokens=[question])
        key = response_key(request, work, b"model")
        assert key is not None
        own = Tokens([tenant, question], FinishReason.STOP)
        if found := await cache.find(key):
            assert [each.tokens for each in found.answers] == [own]
            hits += 1
        else:
            cache.keep(key, [CachedAnswer(own, [])])
            await cache.settle()
    assert hits >= 8_000  # all but each one's first
    await cache.close()


async def test_what_does_not_decide_an_answer_is_not_in_its_key() -> None:
    other = dataclasses.replace(REQUEST, request_id="another", deadline=5.0, caching=Caching.RENEW)
    work = dataclasses.replace(WORK, key=AttemptKey("another", 2), sampling=Sampling(seed=9))
    assert response_key(other, work, b"model") == response_key(REQUEST, WORK, b"model")


async def test_some_requests_have_no_key() -> None:
    sampled = dataclasses.replace(WORK, sampling=Sampling(temperature=1.0, seed=3))
    assert response_key(REQUEST, sampled, b"model") is None
    assert response_key(REQUEST, WORK, b"") is None
    never = dataclasses.replace(REQUEST, caching=Caching.NEVER)
    assert response_key(never, WORK, b"model") is None


UNKNOWN_FINISH = responses_pb2.CachedResponse(
    made_at=2**40,
    answers=[responses_pb2.CachedAnswer(finish_reason=77)],  # type: ignore[arg-type]
)
STARTED, DELTA = inference_pb2.Started(), AnswerDelta("x", [1])
FOUND = FoundResponse([], timing_pb2.ResponseCache(kind="exact"))


class Race:
    """A look-up and a computation whose steps a test takes one by one."""

    def __init__(self, *, searches: bool = False) -> None:
        self.look_up: asyncio.Future[FoundResponse | None] = asyncio.Future()
        self.search: asyncio.Future[FoundResponse | None] = asyncio.Future()
        self.hold_seconds = 0.0
        self.held: list[float] = []
        search = self if searches else None
        self.computed: asyncio.Future[str] = asyncio.Future()
        self.emitted: list[AnswerEvent] = []
        self.emit: Emit | None = None  # of the computation, once it runs
        self.running = asyncio.create_task(
            found_or_computed(self._find(), self._compute, self.emitted.append, 0.001, search)
        )

    async def _find(self) -> FoundResponse | None:
        return await self.look_up

    async def find(self) -> FoundResponse | None:
        return await self.search

    def note_held(self, seconds: float) -> None:
        self.held.append(seconds)

    async def _compute(self, emit: Emit) -> str:
        self.emit = emit
        emit(STARTED)
        return await self.computed

    async def computing(self) -> Emit:
        async def begun() -> bool:
            return self.emit is not None

        await until(begun)
        assert self.emit is not None
        return self.emit


async def test_a_response_that_is_found_at_once_is_not_computed() -> None:
    race = Race()
    race.look_up.set_result(FOUND)
    assert await race.running is FOUND
    assert (race.emit, race.emitted) == (None, [])


async def test_a_response_that_is_found_before_the_first_token_ends_computing() -> None:
    race = Race()
    await race.computing()
    race.look_up.set_result(FOUND)
    assert await race.running is FOUND
    assert race.computed.cancelled()
    assert race.emitted == []  # nobody was told where it was computed


async def test_a_response_that_is_found_later_is_ignored() -> None:
    race = Race()
    emit = await race.computing()
    emit(DELTA)
    assert race.emitted == [STARTED, DELTA]
    race.look_up.set_result(FOUND)
    race.computed.set_result("computed")
    assert await race.running == "computed"


@pytest.mark.parametrize("before", [True, False])
async def test_a_miss_is_computed(before: bool) -> None:
    race = Race()
    if before:
        race.look_up.set_result(None)
    emit = await race.computing()
    if not before:
        race.look_up.set_result(None)
    emit(DELTA)
    race.computed.set_result("computed")
    assert await race.running == "computed"
    assert race.emitted == [STARTED, DELTA]


async def test_a_search_follows_a_miss_and_computing_does_not_wait_for_it() -> None:
    race = Race(searches=True)
    race.look_up.set_result(None)
    await race.computing()
    race.search.set_result(FOUND)
    assert await race.running is FOUND
    assert race.computed.cancelled()


async def test_what_is_found_at_once_is_not_searched() -> None:
    race = Race(searches=True)
    race.look_up.set_result(FOUND)
    assert await race.running is FOUND
    assert (race.emit, race.search.done()) == (None, False)


async def test_a_search_ends_with_the_first_token() -> None:
    race = Race(searches=True)
    race.look_up.set_result(None)
    emit = await race.computing()
    emit(DELTA)
    race.computed.set_result("computed")
    assert await race.running == "computed"
    assert race.search.cancelled()


async def test_only_a_fast_store_gets_a_head_start() -> None:
    store = MemoryStore(10_000, 60.0)
    cache = CachedResponses(store, 60.0, CacheMetrics())
    assert cache.head_start == HEAD_START_SECONDS
    store.reply_seconds = HEAD_START_SECONDS
    assert cache.head_start == 0


async def test_cancelling_ends_both_sides() -> None:
    race = Race()
    await race.computing()
    race.running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await race.running
    assert race.computed.cancelled()
    assert race.look_up.cancelled()


@pytest.mark.parametrize("value", [b"damaged", UNKNOWN_FINISH.SerializeToString()])
async def test_a_value_that_cannot_be_used_is_no_error(value: bytes) -> None:
    store = MemoryStore(2**16, 60.0)
    await store.put(key_of(0), value)
    assert await CachedResponses(store, 60.0, CacheMetrics()).find(key_of(0)) is None


def key_of(number: int, tenant: str = "") -> ResponseKey:
    return ResponseKey(tenant_digest(tenant), bytes([number]) * 32)


async def test_memory_evicts_the_least_recently_used() -> None:
    store = MemoryStore(3 * (100 + ENTRY_BYTES), 60.0)
    for number in range(3):
        await store.put(key_of(number), bytes(100))
    assert await store.get(key_of(0)) is not None
    await store.put(key_of(3), bytes(100))
    assert [await store.get(key_of(number)) is not None for number in range(4)] == [
        True,
        False,
        True,
        True,
    ]
    assert store.used_bytes == 3 * (100 + ENTRY_BYTES)
    with pytest.raises(StoreFailed, match="exceeds the budget"):
        await store.put(key_of(4), bytes(2000))
    assert await store.clear(None) == 3
    assert store.used_bytes == 0


async def test_memory_forgets_what_is_too_old() -> None:
    store = MemoryStore(10_000, 0.0)
    await store.put(key_of(0), b"value")
    assert await store.get(key_of(0)) is None
    assert store.used_bytes == 0


async def test_a_value_that_is_put_again_counts_once() -> None:
    store = MemoryStore(10_000, 60.0)
    for size in (10, 20):
        await store.put(key_of(0), bytes(size))
    assert store.used_bytes == 20 + ENTRY_BYTES


async def held_back(seconds: float) -> Race:
    """A race whose first token waits for a verification."""
    race = Race(searches=True)
    race.look_up.set_result(None)
    emit = await race.computing()
    race.hold_seconds = seconds
    emit(DELTA)
    assert race.emitted == []
    return race


async def test_a_first_token_waits_for_a_hit_that_is_confirmed() -> None:
    race = await held_back(60.0)
    race.search.set_result(FOUND)
    assert await race.running is FOUND
    assert (race.emitted, race.held) == ([], [])
    assert race.computed.cancelled()


async def test_a_first_token_comes_when_a_hit_is_refused() -> None:
    race = await held_back(60.0)
    race.search.set_result(None)
    race.computed.set_result("computed")
    assert await race.running == "computed"
    assert race.emitted == [STARTED, DELTA]
    assert len(race.held) == 1


async def test_a_first_token_waits_no_longer_than_allowed() -> None:
    race = await held_back(0.01)

    async def emitted() -> bool:
        return race.emitted == [STARTED, DELTA]

    await until(emitted)
    assert len(race.held) == 1
    race.computed.set_result("computed")
    assert await race.running == "computed"
    assert race.search.cancelled()

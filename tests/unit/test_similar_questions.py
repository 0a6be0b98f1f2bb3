"""Similar questions in a real Redis: isolated, bounded, shared, and gone with it."""

from __future__ import annotations

import asyncio
import logging
import random
import signal

import numpy as np
import pytest
from patience import be_patient
from similar_texts import ask, opened, vector
from waiting import until

from baton.router.response_cache import redis_store, response_keys
from baton.router.response_cache.cache_store import FoundResponse
from bench.redis_server import RedisServer


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


async def crossings(url: str, requests: int) -> tuple[int, int]:
    """Of requests of 20 tenants with the same questions, each tenant's answer being its number:
    hits, and those that were another tenant's."""
    draw = random.Random(5)
    hits = crossed = 0
    async with opened(url) as cache:
        for _ in range(requests // 20):
            asked = [(draw.randrange(20), draw.randrange(40)) for _ in range(20)]
            texts = [f"subject{subject} {draw.randrange(5)}" for _, subject in asked]
            found = await asyncio.gather(
                *(
                    cache.find(text, f"tenant {tenant}")
                    for (tenant, _), text in zip(asked, texts, strict=True)
                )
            )
            hits += sum(answer is not None for answer in found)
            for (tenant, _), text, answer in zip(asked, texts, found, strict=True):
                if answer is None:
                    await cache.keep(text, tenant, f"tenant {tenant}")
                elif answer != tenant:
                    crossed += 1
    return hits, crossed


@pytest.mark.usefixtures("patient")
async def test_ten_thousand_requests_of_twenty_tenants_cross_no_border(redis: RedisServer) -> None:
    hits, crossed = await crossings(redis.url, 10_000)
    assert crossed == 0
    assert hits > 8_000


@pytest.mark.usefixtures("patient")
async def test_the_tenant_in_the_key_is_what_separates_them(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows that the test before would fail without it."""
    monkeypatch.setattr(response_keys, "tenant_digest", lambda tenant: b"t" * 16)
    _, crossed = await crossings(redis.url, 1_000)
    assert crossed > 100


@pytest.mark.usefixtures("patient")
async def test_two_routers_share_hits_of_similar_questions_only(redis: RedisServer) -> None:
    async with opened(redis.url) as one, opened(redis.url) as other:
        await one.keep("weather today", 7)
        assert await other.find("weather tomorrow") == 7
        assert await other.find("recipe tomorrow") is None
        assert (other.count("hit"), other.count("miss")) == (1, 1)


@pytest.mark.usefixtures("patient")
async def test_callers_may_only_raise_the_similarity(redis: RedisServer) -> None:
    async with opened(redis.url, semantic_similarity=0.9) as cache:
        await cache.keep("weather today", 7)
        cosine = _cosine("weather today", "weather tomorrow")
        assert 0.95 < cosine < 0.999
        assert await cache.find("weather tomorrow", least=0.0) == 7
        assert await cache.find("weather tomorrow", least=0.999) is None
    async with opened(redis.url, semantic_similarity=0.999) as strict:
        assert await strict.find("weather tomorrow", least=0.5) is None
        found = await strict.inquiry(ask("weather today", "alice"), [1]).find()
        assert isinstance(found, FoundResponse)
        assert found.cache.similarity == pytest.approx(1.0)


@pytest.mark.usefixtures("patient")
async def test_redis_and_numpy_agree_on_similarity(redis: RedisServer) -> None:
    async with opened(redis.url, semantic_similarity=0.5) as cache:
        await cache.keep("weather today", 7)
        for text in ("weather tomorrow", "weather in Paris", "weather"):
            found = await cache.inquiry(ask(text, "alice"), [1]).find()
            assert found is not None
            expected = _cosine("weather today", text)
            assert found.cache.similarity == pytest.approx(expected, abs=1e-5)


@pytest.mark.usefixtures("patient")
async def test_the_nearest_is_found_where_eight_bits_cannot_tell(redis: RedisServer) -> None:
    kept = [f"weather {number}" for number in range(12)]
    async with opened(redis.url, semantic_similarity=0.5) as cache:
        for number, text in enumerate(kept):
            await cache.keep(text, number)
        for text in (f"weather then {number}" for number in range(20)):
            cosines = [_cosine(each, text) for each in kept]
            found = await cache.find(text, least=max(cosines) - 1e-6)
            assert found == np.argmax(cosines)


def _cosine(one: str, other: str) -> float:
    a, b = vector(one), vector(other)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.usefixtures("patient")
async def test_a_tenants_least_recently_used_question_is_evicted(redis: RedisServer) -> None:
    async with opened(redis.url, semantic_questions=3) as cache:
        await cache.keep("other", 9, "bob")
        for number in range(3):
            await cache.keep(f"subject{number}", number)
        assert await cache.find("subject0") == 0
        await cache.keep("subject3", 3)
        found = [await cache.find(f"subject{number}") for number in range(4)]
        assert found == [0, None, 2, 3]
        assert await cache.find("other", "bob") == 9  # whose budget is his own


@pytest.mark.usefixtures("patient")
async def test_a_question_without_its_answer_is_forgotten(redis: RedisServer) -> None:
    async with opened(redis.url) as cache:
        await cache.keep("weather today", 7)
        await cache.keep("weather now", 8)
        names = await cache.store.look_up("KEYS", redis_store.PREFIX + b"*")
        assert isinstance(names, list)
        await cache.store.store("DEL", *names)
        assert await cache.find("weather tomorrow") is None
        left = await cache.store.look_up("KEYS", redis_store.SEMANTIC_PREFIX + b"*")
    assert left == []


@pytest.mark.usefixtures("patient")
async def test_all_keys_expire_and_are_cleared_by_tenant(redis: RedisServer) -> None:
    async with opened(redis.url, responses_seconds=60.0) as cache:
        for tenant in ("alice", "bob"):
            await cache.keep("weather today", 7, tenant)
        names = await cache.store.look_up("KEYS", "baton:*")
        assert isinstance(names, list)
        assert len(names) == 6  # of each tenant: an answer, a vector set and its uses
        for name in names:
            left = await cache.store.look_up("PTTL", name)
            assert isinstance(left, int)
            assert 0 < left <= 60_000
        assert await cache.responses.clear("alice") == 1
        assert await cache.find("weather tomorrow") is None
        assert await cache.find("weather tomorrow", "bob") == 7
        assert await cache.responses.clear(None) == 1
    assert redis.command("DBSIZE") == b":0"


@pytest.mark.usefixtures("patient")
async def test_a_killed_redis_is_a_miss_and_is_used_again_once_restarted(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with opened(redis.url) as cache:
        redis.kill()

        async def noticed() -> bool:
            return not cache.store.replies

        await until(noticed)
        for number in range(3):
            assert await cache.find(f"weather {number}") is None
            await cache.keep(f"weather {number}", number)
        assert cache.count("failed") == 3
        redis.start()
        await cache.connected()
        await cache.keep("weather today", 7)
        assert await cache.find("weather tomorrow") == 7
    told = [each for each in caplog.records if "response cache" in each.message]
    assert len(told) == 2  # that it failed, and that it answers again


async def test_a_frozen_redis_is_a_miss_within_5_ms(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(redis.url) as cache:
        redis.process.send_signal(signal.SIGSTOP)
        for number in range(3):
            assert await cache.find(f"weather {number}") is None
        connection = cache.store._connection
        assert connection is None or connection.waiting == 1  # only the first was even sent
        assert cache.count("failed") == 3
        redis.process.send_signal(signal.SIGCONT)
    said = [each.message for each in caplog.records if "answers are computed" in each.message]
    assert len(said) == 1
    assert "no reply within 5 ms" in said[0]


@pytest.mark.usefixtures("patient")
async def test_a_full_redis_still_answers(redis: RedisServer) -> None:
    async with opened(redis.url) as cache:
        await cache.keep("weather today", 7)
        redis.command("CONFIG", "SET", "maxmemory", "1")
        await cache.keep("recipe today", 8)
        assert await cache.find("weather tomorrow") == 7
        assert await cache.find("recipe tomorrow") is None
        redis.command("CONFIG", "SET", "maxmemory", "0")
        await cache.keep("recipe today", 8)
        assert await cache.find("recipe tomorrow") == 8


@pytest.mark.usefixtures("patient")
async def test_a_question_that_is_not_embedded_is_a_failed_search(redis: RedisServer) -> None:
    async with opened(redis.url) as cache:
        await cache.keep("unknown today", 7)
        assert await cache.find("unknown tomorrow") is None
        assert cache.count("failed") == 1
        stores = cache.metrics.semantic_stores
        assert stores.labels(result="failed")._value.get() == 1


@pytest.mark.usefixtures("patient")
async def test_a_hit_that_is_not_confirmed_is_a_miss_and_counted(redis: RedisServer) -> None:
    async with opened(redis.url, semantic_verify_seconds=60.0) as cache:
        await cache.keep("weather today", 7)
        found = await cache.inquiry(ask("weather now", "alice"), [1]).find()
        assert found is not None
        assert found.cache.verified
        inquiry = cache.inquiry(ask("weather on Mars", "alice"), [1])
        assert await inquiry.find() is None
        assert inquiry.refused is not None
        assert (inquiry.refused.denied, inquiry.refused.similarity > 0.95) == (True, True)
        assert await cache.find("recipe") is None  # nothing similar: nothing to verify
        assert [cache.count(each) for each in ("hit", "refused", "miss")] == [1, 1, 1]
        assert [cache.verifications(each) for each in ("confirmed", "denied")] == [1, 1]


@pytest.mark.usefixtures("patient")
async def test_a_hit_that_cannot_be_verified_in_time_is_refused(redis: RedisServer) -> None:
    async with opened(redis.url) as unverified:
        await unverified.keep("weather today", 7)  # without its question
        await unverified.keep("recipe", 8)
    async with opened(redis.url, semantic_verify_seconds=0.01) as cache:
        inquiry = cache.inquiry(ask("weather now", "alice"), [1])
        assert await inquiry.find() is None
        await cache.keep("recipe", 8)
        late = cache.inquiry(ask("recipe on Venus", "alice"), [1])
        assert await late.find() is None
        assert [each.refused and each.refused.denied for each in (inquiry, late)] == [False, False]
        assert (cache.count("refused"), cache.verifications("failed")) == (2, 2)


@pytest.mark.usefixtures("patient")
async def test_questions_are_stored_only_where_hits_are_verified(redis: RedisServer) -> None:
    for seconds, stored in ((0.0, False), (60.0, True)):
        async with opened(redis.url, semantic_verify_seconds=seconds) as cache:
            await cache.keep("weather today", 7)
            (name,) = await cache.store.look_up("KEYS", redis_store.PREFIX + b"*")  # type: ignore[misc]
            value = await cache.store.look_up("GET", name)
            assert isinstance(value, bytes)
            assert (b"weather today" in value) is stored

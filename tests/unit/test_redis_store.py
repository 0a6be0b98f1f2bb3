"""The response cache's store in a real Redis: shared, encrypted, and gone."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import waiting

from baton.core.errors import InvalidConfig
from baton.router.response_cache import redis_store
from baton.router.response_cache.cache_store import ResponseKey, StoreFailed
from baton.router.response_cache.redis_connection import RedisAddress
from baton.router.response_cache.redis_store import RedisStore, ResponseCipher
from bench.redis_server import RedisServer

ALICE, BOB = b"a" * 16, b"b" * 16
KEY = ResponseKey(ALICE, b"1" * 32)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no failed look-up."""
    monkeypatch.setattr(redis_store, "LOOKUP_SECONDS", 5.0)
    monkeypatch.setattr(redis_store, "STORE_SECONDS", 5.0)
    monkeypatch.setattr(redis_store, "RETRY_SECONDS", 0.05)


@asynccontextmanager
async def opened(url: str, cipher: ResponseCipher | None = None) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, 60.0, cipher)
    try:
        await until(lambda: store._connection is not None)
        yield store
    finally:
        await store.close()


async def until(condition: Callable[[], bool]) -> None:
    async def holds() -> bool:
        return condition()

    await waiting.until(holds)


@pytest.mark.usefixtures("patient")
async def test_two_routers_share_values(redis: RedisServer) -> None:
    async with opened(redis.url) as first, opened(redis.url) as second:
        assert await second.get(KEY) is None
        await first.put(KEY, b"\r\n\0 any bytes")
        assert await second.get(KEY) == b"\r\n\0 any bytes"
        assert await second.get(ResponseKey(BOB, KEY.request)) is None


@pytest.mark.usefixtures("patient")
async def test_many_commands_are_in_flight_at_once(redis: RedisServer) -> None:
    async with opened(redis.url) as store:
        keys = [ResponseKey(ALICE, bytes([number]) * 32) for number in range(200)]
        await asyncio.gather(*(store.put(key, key.request * 100) for key in keys))
        values = await asyncio.gather(*map(store.get, keys))
        assert values == [key.request * 100 for key in keys]


@pytest.mark.usefixtures("patient")
async def test_one_tenants_values_are_cleared(redis: RedisServer) -> None:
    async with opened(redis.url) as store:
        for tenant in (ALICE, BOB):
            for number in range(3):
                await store.put(ResponseKey(tenant, bytes([number]) * 32), b"value")
        assert await store.clear(ALICE) == 3
        assert await store.get(ResponseKey(ALICE, bytes(32))) is None
        assert await store.get(ResponseKey(BOB, bytes(32))) == b"value"
        redis.command("SET", "another", "value")
        assert await store.clear(None) == 3
    assert redis.command("DBSIZE") == b":1"


@pytest.mark.usefixtures("patient")
async def test_values_expire_in_redis(redis: RedisServer) -> None:
    async with opened(redis.url) as store:
        await store.put(KEY, b"value")
    name = redis_store.value_name(KEY).decode()
    assert 0 < int(redis.command("PTTL", name)[1:]) <= 60_000


@pytest.mark.usefixtures("patient")
async def test_encrypted_values_need_their_secret_and_their_key(
    redis: RedisServer, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"s" * 32)
    cipher = ResponseCipher.load(str(tmp_path / "secret"))
    async with opened(redis.url, cipher) as store, opened(redis.url) as bare:
        await store.put(KEY, b"the answer")
        assert await store.get(KEY) == b"the answer"
        assert b"answer" not in (await bare.get(KEY) or b"")
        moved = ResponseKey(BOB, KEY.request)
        await bare.put(moved, await bare.get(KEY) or b"")
        with pytest.raises(StoreFailed, match="decrypted"):
            await store.get(moved)
    async with opened(redis.url, ResponseCipher(b"another")) as other:
        with pytest.raises(StoreFailed, match="decrypted"):
            await other.get(KEY)


@pytest.mark.usefixtures("patient")
async def test_a_password_and_a_database_are_used(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--requirepass", "p@ss") as redis:
        async with opened(f"redis://:p%40ss@127.0.0.1:{redis.port}/3") as store:
            await store.put(KEY, b"value")
            assert await store.get(KEY) == b"value"


@pytest.mark.usefixtures("patient")
async def test_a_killed_redis_fails_at_once_and_is_found_again(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with opened(redis.url) as store:
        redis.kill()
        await until(lambda: store._connection is None)
        for _ in range(3):
            with pytest.raises(StoreFailed):
                await store.get(KEY)
            with pytest.raises(StoreFailed):
                await store.put(KEY, b"value")
        redis.start()
        await until(lambda: store._connection is not None)
        await store.put(KEY, b"value")
        assert await store.get(KEY) == b"value"
    told = [record.message for record in caplog.records if "response cache" in record.message]
    assert len(told) == 2, told
    assert "connection was lost; answers are computed" in told[0]
    assert told[1].endswith("answers again")


async def test_a_frozen_redis_fails_look_ups_until_it_goes_on(
    redis: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "RETRY_SECONDS", 0.05)
    async with opened(redis.url) as store:
        redis.process.send_signal(signal.SIGSTOP)
        sent = store._connection
        assert sent is not None
        with pytest.raises(StoreFailed, match="no reply within 5 ms"):
            await store.get(KEY)
        assert sent.waiting == 1
        assert store.reply_seconds >= 0.005 * redis_store.REPLY_WEIGHT
        with pytest.raises(StoreFailed):
            await store.get(KEY)
        assert sent.waiting == 1  # the second was not even sent
        await until(lambda: store._connection is None)
        redis.process.send_signal(signal.SIGCONT)
        await until(lambda: store._connection is not None)
        monkeypatch.setattr(redis_store, "LOOKUP_SECONDS", 5.0)
        assert await store.get(KEY) is None
    assert len([each for each in caplog.records if "answers are computed" in each.message]) == 1


@pytest.mark.usefixtures("patient")
async def test_a_full_redis_fails_to_store_and_still_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(tmp_path) as redis:
        async with opened(redis.url) as store:
            await store.put(KEY, b"value")
            redis.command("CONFIG", "SET", "maxmemory", "1")
            for number in range(3):
                with pytest.raises(StoreFailed, match="maxmemory"):
                    await store.put(ResponseKey(ALICE, bytes([number]) * 32), b"value")
            assert await store.get(KEY) == b"value"
    assert len([each for each in caplog.records if "answers are computed" in each.message]) == 1


@pytest.mark.parametrize(
    "url", ["", "localhost:6379", "http://host", "redis://", "redis://host:x", "redis://host/zero"]
)
def test_what_is_no_url_of_a_redis_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfig, match="must be a URL such as"):
        RedisAddress.parse(url)


def test_a_url_is_parsed_and_shown_without_its_password() -> None:
    address = RedisAddress.parse("rediss://me:secret@host/2")
    assert address == RedisAddress("host", 6379, "me", "secret", 2, tls=True)
    assert "secret" not in str(address)


def test_a_short_or_missing_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot read"):
        ResponseCipher.load(str(tmp_path / "secret"))
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(InvalidConfig, match="32 bytes or more"):
        ResponseCipher.load(str(tmp_path / "secret"))

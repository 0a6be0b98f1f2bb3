"""Tenants that ask the same questions, of two routers that share a real Redis."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from front_door import front_door

from baton import AsyncClient
from baton.core.api_keys import make_key, write_keys
from baton.router.response_cache import redis_store
from bench.redis_server import RedisServer

TENANTS, QUESTIONS, REQUESTS, AT_ONCE = 10, 10, 400, 32


async def test_no_tenant_is_given_anothers_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer from the cache is one that the same tenant's request began to compute."""
    for name in ("LOOKUP_SECONDS", "STORE_SECONDS"):  # a busy machine is no failure
        monkeypatch.setattr(redis_store, name, 10.0)
    keys = [make_key(f"tenant-{number}") for number in range(TENANTS)]
    write_keys(tmp_path / "keys.yaml", [key for _, key in keys])
    draw = random.Random(5)
    drawn = [(draw.randrange(TENANTS), draw.randrange(QUESTIONS)) for _ in range(REQUESTS)]
    asked: Counter[tuple[int, int]] = Counter()
    hits = 0

    async def ask(client: AsyncClient, tenant: int, question: int) -> None:
        nonlocal hits
        asked[tenant, question] += 1
        answer = await client.generate([question + 10], max_tokens=2, cache_salt="the same")
        cached = answer.usage.response_cache == "exact"
        # Of two that are asked at once, either may be answered first.
        assert asked[tenant, question] > cached, (tenant, question)
        hits += cached

    with RedisServer(tmp_path) as redis:
        cache = {"cache": {"responses": "exact", "redis": redis.url}}
        async with AsyncExitStack() as stack:
            routers = [
                await stack.enter_async_context(front_door(cache, keys=str(tmp_path / "keys.yaml")))
                for _ in range(2)
            ]
            clients = [
                [
                    await stack.enter_async_context(AsyncClient(each.address, api_key=secret))
                    for secret, _ in keys
                ]
                for each in routers
            ]
            for start in range(0, REQUESTS, AT_ONCE):
                await asyncio.gather(
                    *(
                        ask(draw.choice(clients)[tenant], tenant, question)
                        for tenant, question in drawn[start : start + AT_ONCE]
                    )
                )
    assert hits > REQUESTS / 2

"""The gain and cost of the response cache: `python -m bench.responses`.

Runs three routers in this process, between a client and workers that answer at once: without a
cache, with a cache in memory, and with one in a real Redis. The caches are filled with responses of
200 tokens. Measures, in turn, the time from sending a request to its first token: first for misses,
then for hits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import uvloop

from baton import AsyncClient
from baton.core import config as configs
from baton.core import model_store
from baton.core.metrics import Spread
from baton.core.process import StopSignal
from baton.core.types import FinishReason, Role
from baton.router.answers.answer import CachedAnswer
from baton.router.requests.attempt import Tokens
from baton.router.response_cache.cache_store import ResponseKey
from baton.router.response_cache.cached_responses import CachedResponses
from baton.router.server import RouterServer
from bench.instant_worker import InstantWorker, Pace
from bench.redis_server import RedisServer

LETTER = 81
ANSWER_TOKENS = 200
PROMPT_TOKENS = 200
AT_ONCE = 100
"""Responses that are stored concurrently."""


@contextlib.asynccontextmanager
async def router(
    cache: Mapping[str, object], pace: Pace | None = None, embedding_model: str = ""
) -> AsyncIterator[RouterServer]:
    pace = pace or Pace(LETTER)
    pace.go.set()
    name = model_store.EMBEDDED_NAME
    workers = [InstantWorker(role, f"{role.value}-0", name, pace) for role in Role]
    members = {"workers": [await worker.start() for worker in workers]}
    ports = {"port": 0, "http_port": 0, "metrics_port": 0, "canary_seconds": 0}
    tree = {"router": ports, "members": members, "cache": cache, "drain_seconds": 0}
    server = RouterServer(configs.parse({**tree, "embedding_model": embedding_model}))
    await server.start()
    await server.wait_ready()
    stopping = StopSignal()
    serving = asyncio.ensure_future(server.serve_until(stopping))
    yield server
    stopping.request()
    await serving
    for worker in workers:
        await worker.stop()


async def fill(responses: CachedResponses, entries: int) -> None:
    answer = CachedAnswer(Tokens([LETTER] * ANSWER_TOKENS, FinishReason.LENGTH), ())
    for _ in range(entries // AT_ONCE):
        for _ in range(AT_ONCE):
            responses.keep(ResponseKey(os.urandom(16), os.urandom(32)), [answer])
        await responses.settle()


async def first_token(client: AsyncClient, prompt: list[int]) -> tuple[float, bool]:
    """Milliseconds to the first token, and whether the answer came from the cache."""
    began = time.perf_counter()
    async with client.stream(prompt, max_tokens=ANSWER_TOKENS) as stream:
        await anext(stream)
        seconds = time.perf_counter() - began
        async for _ in stream:
            pass
        return seconds * 1000, bool(stream.answer.usage.response_cache)


async def measure(entries: int, requests: int, redis: RedisServer) -> None:
    caches: dict[str, dict[str, object]] = {
        "no cache": {},
        "memory": {"responses": "exact"},
        "Redis": {"responses": "exact", "redis": redis.url},
    }
    async with contextlib.AsyncExitStack() as stack:
        clients: dict[str, AsyncClient] = {}
        for name, cache in caches.items():
            server = await stack.enter_async_context(router(cache))
            if server._responses:
                await fill(server._responses, entries)
            client = AsyncClient(server.address)
            clients[name] = await stack.enter_async_context(client)
        print(f"{redis.command('DBSIZE').decode()[1:]} responses in Redis")
        await report(clients, requests)


async def report(clients: dict[str, AsyncClient], requests: int) -> None:
    print(f"{'milliseconds to the first token':<32}     p50      p90      p99     hits")
    for kind in ("miss", "hit"):
        taken: dict[str, list[tuple[float, bool]]] = {name: [] for name in clients}
        for number in range(requests):
            for name, client in clients.items():
                taken[name].append(await first_token(client, [number] * PROMPT_TOKENS))
        for name, each in taken.items():
            if kind == "miss" or name != "no cache":
                spread = Spread.of([milliseconds for milliseconds, _ in each])
                figures = f"{spread.p50:8.2f} {spread.p90:8.2f} {spread.p99:8.2f}"
                print(f"{kind + ', ' + name:<32}{figures} {sum(hit for _, hit in each):8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=100_000, help="responses in each cache")
    parser.add_argument("--requests", type=int, default=500, help="of each kind, per router")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as redis:
        uvloop.run(measure(arguments.entries, arguments.requests, redis))


if __name__ == "__main__":
    main()

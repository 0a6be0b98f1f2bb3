"""Sends requests: as others end (closed loop), or when their time has come (open loop)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import httpx

from baton.cli.load_client import Call, Target, ask
from baton.cli.load_shapes import Load

Progress = Callable[[Call], None]


async def closed_loop(
    target: Target, loads: Sequence[Load], concurrency: int, progress: Progress
) -> list[Call]:
    """Always so many at once, until all are answered."""
    waiting = iter(loads)
    calls: list[Call] = []
    start = time.perf_counter()

    async def user(client: httpx.AsyncClient) -> None:
        for load in waiting:
            call = await ask(client, target, load, time.perf_counter() - start)
            calls.append(call)
            progress(call)

    async with target.client() as client:
        await asyncio.gather(*(user(client) for _ in range(min(concurrency, len(loads)))))
    return calls


async def open_loop(target: Target, loads: Sequence[Load], progress: Progress) -> list[Call]:
    """Each at its time, however many are under way."""
    start = time.perf_counter()

    async def send(client: httpx.AsyncClient, load: Load) -> Call:
        await asyncio.sleep(load.at_seconds - (time.perf_counter() - start))
        call = await ask(client, target, load, load.at_seconds)
        progress(call)
        return call

    async with target.client() as client:
        return list(await asyncio.gather(*(send(client, load) for load in loads)))

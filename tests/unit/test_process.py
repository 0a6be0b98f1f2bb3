from __future__ import annotations

import asyncio

from baton.core.process import StopSignal


def test_a_second_request_stops_immediately() -> None:
    stopping = StopSignal()
    stopping.request()
    assert (stopping.requested.is_set(), stopping.immediate.is_set()) == (True, False)
    stopping.request()
    assert stopping.immediate.is_set()


async def test_waiting_ends_when_the_work_is_done() -> None:
    done = asyncio.Event()
    done.set()
    async with asyncio.timeout(5):
        await StopSignal().wait_at_most(60.0, done)


async def test_the_wait_has_a_bound() -> None:
    async with asyncio.timeout(5):
        await StopSignal().wait_at_most(0.01, asyncio.Event())


async def test_a_hurry_ends_the_wait() -> None:
    stopping = StopSignal()
    asyncio.get_running_loop().call_soon(stopping.immediate.set)
    async with asyncio.timeout(5):
        await stopping.wait_at_most(60.0, asyncio.Event())

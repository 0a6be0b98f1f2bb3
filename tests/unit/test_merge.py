from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from core.errors import Exhausted
from router.merge import merged


class Source:
    """Brings what it is told to, and says when it was closed."""

    def __init__(self) -> None:
        self.closed = False
        self.arrivals: asyncio.Queue[int | Exception | None] = asyncio.Queue()

    async def run(self) -> AsyncGenerator[int]:
        try:
            while (arrival := await self.arrivals.get()) is not None:
                if isinstance(arrival, Exception):
                    raise arrival
                yield arrival
        finally:
            self.closed = True


async def test_items_come_in_the_order_of_their_arrival_until_all_sources_end() -> None:
    one, other = Source(), Source()
    stream = merged([one.run(), other.run()])
    for source, item in ((other, 1), (one, 2), (other, 3)):
        source.arrivals.put_nowait(item)
        assert await anext(stream) == item
    one.arrivals.put_nowait(None)
    other.arrivals.put_nowait(4)
    other.arrivals.put_nowait(None)
    assert [item async for item in stream] == [4]


async def test_an_error_of_one_source_ends_them_all() -> None:
    one, other = Source(), Source()
    one.arrivals.put_nowait(Exhausted("full"))
    with pytest.raises(Exhausted):
        await anext(merged([one.run(), other.run()]))
    assert one.closed
    assert other.closed


async def test_closing_the_stream_closes_every_source() -> None:
    one, other = Source(), Source()
    one.arrivals.put_nowait(1)
    async with aclosing(merged([one.run(), other.run()])) as stream:
        await anext(stream)
        assert not other.closed
    assert one.closed
    assert other.closed

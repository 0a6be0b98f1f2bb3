"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


async def merged(sources: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[Item]:
    """What the sources bring, as it comes. An error of one, or closing this, ends them all."""
    arrivals: asyncio.Queue[Item | _End] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(source, arrivals)) for source in sources]
    open_sources = len(sources)
    try:
        while open_sources:
            arrival = await arrivals.get()
            if not isinstance(arrival, _End):
                yield arrival
            elif arrival.error is not None:
                raise arrival.error
            else:
                open_sources -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(source: AsyncGenerator[Item], arrivals: asyncio.Queue[Item | _End]) -> None:
    try:
        async with aclosing(source):
            async for item in source:
                arrivals.put_nowait(item)
        arrivals.put_nowait(_End(None))
    except Exception as error:  # noqa: BLE001 - whoever reads raises it
        arrivals.put_nowait(_End(error))

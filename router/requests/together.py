"""Several works at once, which share their fate."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TypeVar

Result = TypeVar("Result")


async def together(works: Sequence[Coroutine[None, None, Result]]) -> list[Result]:
    """What each leads to. An error of one, or cancelling this, ends them all."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

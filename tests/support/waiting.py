"""Waits for a condition, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


async def until(
    condition: Callable[[], Awaitable[bool]], seconds: float = 60.0, pause: float = 0.02
) -> None:
    """Returns when the condition holds, which is checked every `pause` seconds."""
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "it did not become so in time"
        await asyncio.sleep(pause)

"""Asyncio tasks."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancels them and waits for their ends, however they end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""Between an answer as it is made and a client that reads it, at its own pace.

What the client has not taken yet is joined into one piece. Past the limit the
client counts as gone: its answer ends with SlowReader, and nobody else waits.
"""

from __future__ import annotations

import asyncio
from collections import deque

from core.errors import SlowReader
from router.serving import Delta, Event


class AnswerBuffer:
    """Written with `put` and `close`, read by iterating."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: deque[Event] = deque()
        self._closed = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, event: Event) -> None:
        """Raises SlowReader when more than the limit's tokens would wait."""
        last = self._events[-1] if self._events else None
        if isinstance(event, Delta) and isinstance(last, Delta):
            if len(last.token_ids) + len(event.token_ids) > self._limit:
                raise SlowReader(
                    f"{len(last.token_ids)} tokens of the answer were not read in time"
                )
            self._events[-1] = Delta(last.text + event.text, last.token_ids + event.token_ids)
        else:
            self._events.append(event)
        self._changed.set()

    def close(self, error: Exception | None = None) -> None:
        """Nothing more comes. The reader gets `error` after what it has not read yet."""
        self._closed, self._error = True, error
        self._changed.set()

    def __aiter__(self) -> AnswerBuffer:
        return self

    async def __anext__(self) -> Event:
        while not self._events and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if self._events:
            return self._events.popleft()
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

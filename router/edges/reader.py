"""Between an answer as it is made and a client that reads it, at its own pace.

What the client can take is written at once, by whoever makes it. What it has not
taken yet is joined into one piece an answer. Past the limit the client counts as
gone: its answers end with SlowReader, and nobody else waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from baton.core.errors import SlowReader
from baton.router.answers.answer_events import AnswerDelta, AnswerEvent, Emit


class AnswerBuffer:
    """Written with `put` and `close`, read by iterating."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: deque[AnswerEvent] = deque()
        self._waiting = 0  # tokens
        self._closed = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        # Writes an event without waiting; False when that cannot be, and nothing is written.
        self.write_now: Callable[[AnswerEvent], bool] = lambda event: False

    @property
    def _reader_waits(self) -> bool:
        """Whether the reader has written all that came, and is not called yet."""
        return self._waiter is not None and not self._waiter.done()

    def put(self, event: AnswerEvent) -> None:
        """Raises SlowReader when more than the limit's tokens would wait."""
        if self._reader_waits and self.write_now(event):
            return
        if isinstance(event, AnswerDelta):
            self._join(event)
        else:
            self._events.append(event)
        self._wake()

    def _join(self, delta: AnswerDelta) -> None:
        if self._waiting and self._waiting + len(delta.token_ids) > self._limit:
            raise SlowReader(f"{self._waiting} tokens of the answer were not read in time")
        self._waiting += len(delta.token_ids)
        for place, event in enumerate(self._events):
            if isinstance(event, AnswerDelta) and event.index == delta.index:
                self._events[place] = AnswerDelta(
                    event.text + delta.text,
                    event.token_ids + delta.token_ids,
                    delta.index,
                    event.logprobs + delta.logprobs,
                    event.reasoning + delta.reasoning,
                    event.tool_calls + delta.tool_calls,
                    event.prompt_logprobs + delta.prompt_logprobs,
                )
                return
        self._events.append(delta)

    def close(self, error: Exception | None = None) -> None:
        """Nothing more comes. The reader gets `error` after what it has not read yet. What was
        said first holds."""
        if not self._closed:
            self._closed, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> AnswerBuffer:
        return self

    async def __anext__(self) -> AnswerEvent:
        while not self._events and not self._closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._events:
            return self._take()
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    def _take(self) -> AnswerEvent:
        event = self._events.popleft()
        if isinstance(event, AnswerDelta):
            self._waiting -= len(event.token_ids)
        return event


@asynccontextmanager
async def reading(
    make: Callable[[Emit], Awaitable[None]], limit: int
) -> AsyncIterator[AnswerBuffer]:
    """An answer that is made at its own pace, however fast it is read. Leaving ends it."""
    buffer = AnswerBuffer(limit)
    making = asyncio.create_task(_fill(buffer, make(buffer.put)))
    try:
        yield buffer
    finally:
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)


async def _fill(buffer: AnswerBuffer, making: Awaitable[None]) -> None:
    try:
        await making
        buffer.close()
    except Exception as error:  # noqa: BLE001 whoever reads raises it
        buffer.close(error)

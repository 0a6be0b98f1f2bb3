"""Buffers an answer for a client that reads at its own pace.

While the client keeps up, the code that emits an event writes it at once. Otherwise events are
merged into one delta per answer. Past the limit the client counts as gone: its answers end with
SlowReader, and nothing else waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from baton.core.errors import SlowReader
from baton.router.answers.answer_events import AnswerDelta, AnswerEvent


class ClientBuffer:
    """Filled with `put` until `close`, drained by iterating."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: deque[AnswerEvent] = deque()
        self._tokens = 0  # in `_events`, without those of answers from the response cache
        self._closed = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        # Writes an event without waiting, or returns False and writes nothing.
        self.write_now: Callable[[AnswerEvent], bool] = lambda event: False

    @property
    def _drained(self) -> bool:
        """True if the consumer has written everything and waits for more."""
        return self._waiter is not None and not self._waiter.done()

    def put(self, event: AnswerEvent) -> None:
        """Raises SlowReader if more tokens than the limit would be buffered."""
        if self._drained and self.write_now(event):
            return
        if isinstance(event, AnswerDelta) and not event.replayed:
            self._merge(event)
        else:
            self._events.append(event)
        self._wake()

    def _merge(self, delta: AnswerDelta) -> None:
        if self._tokens and self._tokens + len(delta.token_ids) > self._limit:
            raise SlowReader(f"{self._tokens} tokens of the answer were not read in time")
        self._tokens += len(delta.token_ids)
        for event in self._events:
            if isinstance(event, AnswerDelta) and event.index == delta.index:
                event.add(delta)
                return
        self._events.append(delta)

    def close(self, error: Exception | None = None) -> None:
        """Ends the iteration after the buffered events, with `error` if given. Only the first call
        counts."""
        if not self._closed:
            self._closed, self._error = True, error
        self._wake()

    async def close_after(self, generating: Awaitable[None]) -> None:
        """Closes when `generating`, which fills this buffer, ends; with its error, if any."""
        try:
            await generating
            self.close()
        except Exception as error:  # noqa: BLE001 raised in the consumer
            self.close(error)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> ClientBuffer:
        return self

    async def __anext__(self) -> AnswerEvent:
        while not self._events and not self._closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._events:
            event = self._events.popleft()
            if isinstance(event, AnswerDelta) and not event.replayed:
                self._tokens -= len(event.token_ids)
            return event
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

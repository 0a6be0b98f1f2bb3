"""What workers say of one attempt, until whoever follows the attempt takes it.

Those who wait are woken in rounds. A round takes as long as they take to pass on
what came, down to the clients' messages; before the next one the loop is left to
others for a part of that time. So a router with little to do passes every token on
at once, and one with much to do reads on from its workers, and joins what waits for
the same client into one message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from router.attempt import Event

PAUSE = 0.5
"""Between two rounds, as a part of the time that the first one took."""

SHORTEST_PAUSE = 0.001
"""In seconds. Timers are no finer."""


class Rounds:
    """Calls those who wait, all together."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Callable[[], None]] = []
        self._planned = False  # a round is to come, or under way
        self._not_before = 0.0

    def join(self, wake: Callable[[], None]) -> None:
        """Has `wake` called in the next round."""
        self._waiting.append(wake)
        if not self._planned:
            self._plan()

    def _plan(self) -> None:
        self._planned = True
        pause = self._not_before - time.monotonic()
        if pause < SHORTEST_PAUSE:
            self._loop.call_soon(self._run)
        else:
            self._loop.call_later(pause, self._run)

    def _run(self) -> None:
        began = time.monotonic()
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()
        # Those who are woken run next, and then those that they wake.
        self._loop.call_soon(self._loop.call_soon, self._end, began)

    def _end(self, began: float) -> None:
        now = time.monotonic()
        self._not_before = now + PAUSE * (now - began)
        self._planned = False
        if self._waiting:
            self._plan()


class Inbox:
    """Filled by links, and emptied by the one task that follows the attempt."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._loop = asyncio.get_running_loop()
        self._events: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put_nowait(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) == 1 and self._waiter:
            self._rounds.join(self._wake)

    async def take(self, seconds: float) -> list[Event]:
        """All that has come, as soon as that is anything; TimeoutError after so many seconds."""
        if not self._events:
            self._waiter = self._loop.create_future()
            self._deadline = self._loop.time() + seconds
            if self._timer is None or self._timer.when() > self._deadline:
                self._set_timer(seconds)
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    def _set_timer(self, seconds: float) -> None:
        self.close()
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """One timer serves all waits: most end long before it, and then it is set anew."""
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        left = self._deadline - self._loop.time()
        if left > 0:
            self._set_timer(left)
        else:
            self._waiter.set_exception(TimeoutError())

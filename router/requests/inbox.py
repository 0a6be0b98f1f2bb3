"""Events of one attempt, from its links to its handler.

Handlers run in rounds, one after the other: each emits its tokens, down to the client's socket if
the client keeps up, before the next one runs. After a round, the loop is free for other work for a
share of the time that the round took. So an idle router emits every token at once, while a busy
one keeps reading from its workers and merges what waits for the same client into one message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from baton.router.requests.attempt import AttemptEvent

PAUSE = 0.5
"""The pause after a round, as a share of its duration."""

SHORTEST_PAUSE = 0.001
"""Shorter pauses are skipped: timers are no finer."""


class Rounds:
    """Calls waiting handlers one after the other."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Callable[[], None]] = []
        self._planned = False  # a round is scheduled or running
        self._not_before = 0.0

    def join(self, handler: Callable[[], None]) -> None:
        """Calls `handler` in the next round."""
        self._waiting.append(handler)
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
        for handler in waiting:
            handler()
        # Runs after the tasks that the handlers woke.
        self._loop.call_soon(self._end, began)

    def _end(self, began: float) -> None:
        now = time.monotonic()
        self._not_before = now + PAUSE * (now - began)
        self._planned = False
        if self._waiting:
            self._plan()


class Inbox:
    """Filled by links, drained by the attempt's handler."""

    def __init__(
        self,
        rounds: Rounds,
        handle: Callable[[list[AttemptEvent]], float],
        more_time: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`handle` returns the seconds to wait for more events; 0 ends `drain`. If none comes in
        time, `more_time` returns the seconds by which to extend the wait."""
        self._rounds = rounds
        self._handle = handle
        self._more_time = more_time
        self._loop = asyncio.get_running_loop()
        self._events: list[AttemptEvent] = []
        self._over: asyncio.Future[bool] = self._loop.create_future()
        self._deadline = 0.0

    def put(self, event: AttemptEvent) -> None:
        self._events.append(event)
        if len(self._events) == 1:
            self._rounds.join(self._hand_over)

    async def drain(self, seconds: float) -> bool:
        """Passes events to the handler until it returns 0. Returns False if none came in time; the
        first must come within `seconds`. Raises the handler's errors."""
        self._deadline = self._loop.time() + seconds
        self._check_deadline()
        try:
            return await self._over
        finally:
            self._timer.cancel()

    def _hand_over(self) -> None:
        if self._over.done():
            return
        events, self._events = self._events, []
        try:
            seconds = self._handle(events)
        except Exception as error:  # noqa: BLE001 raised in `drain`
            self._over.set_exception(error)
            return
        if not seconds:
            self._over.set_result(True)
            return
        self._deadline = self._loop.time() + seconds
        if self._timer.when() > self._deadline:
            self._timer.cancel()
            self._check_deadline()

    def _check_deadline(self) -> None:
        """Ends the drain at the deadline. One timer serves all waits: when it fires before the
        current deadline, it is set again."""
        now = self._loop.time()
        if self._deadline <= now and not self._over.done():
            self._deadline = now + self._more_time()
        if self._deadline > now:
            self._timer = self._loop.call_at(self._deadline, self._check_deadline)
        elif not self._over.done():
            self._over.set_result(False)

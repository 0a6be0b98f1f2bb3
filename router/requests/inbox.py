"""What workers say of one attempt, until whoever follows the attempt is called with it.

Followers are called in rounds, one after the other: each passes on what came before
the next is called, down to the client's message where its client keeps up. Before the
next round the loop is left to others for a part of the time that this one took. So a
router with little to do passes every token on at once, and one with much to do reads
on from its workers, and joins what waits for the same client into one message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from baton.router.requests.attempt import AttemptEvent

PAUSE = 0.5
"""Between two rounds, as a part of the time that the first one took."""

SHORTEST_PAUSE = 0.001
"""In seconds. Timers are no finer."""


class Follower(Protocol):
    @property
    def patience(self) -> float:
        """For how many seconds nothing may come."""

    def take(self, events: list[AttemptEvent]) -> bool:
        """Passes on what came. Whether more is wanted."""


class Rounds:
    """Calls those for whom something came, one after the other."""

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
        # Those whom they wake run next.
        self._loop.call_soon(self._end, began)

    def _end(self, began: float) -> None:
        now = time.monotonic()
        self._not_before = now + PAUSE * (now - began)
        self._planned = False
        if self._waiting:
            self._plan()


class Inbox:
    """Filled by links, and emptied by the one who follows the attempt."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._loop = asyncio.get_running_loop()
        self._events: list[AttemptEvent] = []
        self._follower: Follower | None = None
        self._over: asyncio.Future[bool] = self._loop.create_future()
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put_nowait(self, event: AttemptEvent) -> None:
        self._events.append(event)
        if len(self._events) == 1 and self._follower:
            self._rounds.join(self._hand_over)

    async def follow(self, follower: Follower) -> bool:
        """Has the follower take all that comes, until nothing more is wanted. False when nothing
        came for as long as it waits. What it raises is raised here."""
        self._follower = follower
        self._wait_on(follower)
        if self._events:
            self._rounds.join(self._hand_over)
        try:
            return await self._over
        finally:
            self._follower = None
            self._clear_timer()

    def _hand_over(self) -> None:
        follower = self._follower
        if follower is None or self._over.done():
            return
        events, self._events = self._events, []
        try:
            wants_more = follower.take(events)
        except Exception as error:  # noqa: BLE001 whoever awaits the end raises it
            self._over.set_exception(error)
            return
        if wants_more:
            self._wait_on(follower)
        else:
            self._over.set_result(True)

    def _wait_on(self, follower: Follower) -> None:
        """One timer serves all waits: most end long before it, and then it is set anew."""
        seconds = follower.patience
        self._deadline = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._deadline:
            self._set_timer(seconds)

    def _set_timer(self, seconds: float) -> None:
        self._clear_timer()
        self._timer = self._loop.call_later(seconds, self._look)

    def _clear_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        left = self._deadline - self._loop.time()
        if left > 0:
            self._set_timer(left)
        elif not self._over.done():
            self._over.set_result(False)

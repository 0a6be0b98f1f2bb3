"""Admits requests to workers in order of arrival, as there is room for them.

A worker gets a few requests beyond those that it has begun or reserved pages for; all others wait
here, visible, counted and bounded.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import math
import time
from dataclasses import dataclass

from baton.core.config import RouterConfig
from baton.core.errors import BatonError, DeadlineExceeded, Exhausted, LayoutMismatch, Unavailable
from baton.router.observe.metrics import RouterMetrics
from baton.router.placement.placement import Placement, Suspicion
from baton.router.placement.placer import Placer
from baton.router.requests.attempt import RetryState
from baton.router.workers.link import WorkerLink
from baton.router.workers.membership import Membership

SHORTEST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0
# Weight of the latest interval between two admissions.
LATEST_SHARE = 0.2
# Errors that waiting does not change.
FINAL = (LayoutMismatch, DeadlineExceeded)


@dataclass(frozen=True, slots=True)
class Assignment:
    """The workers of one attempt."""

    placement: Placement
    prefill: WorkerLink | None
    decode: WorkerLink | None
    holder: WorkerLink | None = None  # has pages that the prefill worker is to fetch

    @property
    def links(self) -> list[WorkerLink]:
        return [link for link in (self.prefill, self.decode) if link]

    @property
    def prefiller(self) -> WorkerLink:
        """The worker that prefills the prompt."""
        return self.links[0]

    @property
    def responder(self) -> WorkerLink:
        """The worker whose first message ends the request's wait there."""
        return self.links[-1]


class WaitQueue:
    """Requests that wait for a worker with room, in order of arrival. A retry keeps its request's
    place and is never refused. No I/O and no clock."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: list[int] = []  # by order of arrival
        self._admitted_at: float | None = None
        self._interval = 0.0  # between two admissions, smoothed

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def head(self) -> int | None:
        return self._waiting[0] if self._waiting else None

    @property
    def retry_after(self) -> float:
        """Seconds until the requests that wait now are likely to be admitted."""
        expected = self._interval * len(self._waiting)
        return min(max(expected, SHORTEST_RETRY_SECONDS), LONGEST_RETRY_SECONDS)

    def join(self, order: int, *, retry: bool = False) -> None:
        """Raises Exhausted when the queue is full, unless the request is a retry."""
        if len(self._waiting) >= self._limit and not retry:
            raise Exhausted(
                f"{len(self._waiting)} requests wait already; try again later",
                retry_after=self.retry_after,
            )
        bisect.insort(self._waiting, order)

    def leave(self, order: int) -> None:
        """No effect when it is not in the queue."""
        if order in self._waiting:
            self._waiting.remove(order)

    def admitted(self, now: float) -> None:
        """The head has its workers."""
        if self._admitted_at is not None:
            self._interval += LATEST_SHARE * (now - self._admitted_at - self._interval)
        self._admitted_at = now


class Admission:
    def __init__(
        self, membership: Membership, placer: Placer, config: RouterConfig, metrics: RouterMetrics
    ) -> None:
        self._membership = membership
        self._placer = placer
        self._config = config
        self._metrics = metrics
        metrics.queued_requests.set_function(lambda: self.queued)
        self._queue = WaitQueue(config.max_queued)
        # Suspects may have to wait for each other. They wait beside the queue, so that others do
        # not wait for them, and are looked at first.
        self._suspects: set[int] = set()
        self._orders = itertools.count()
        self._waiters: dict[int, asyncio.Event] = {}
        # Since when no request can be placed; None while one can.
        self._missing_since: float | None = None
        membership.listen(self._membership_changed)

    @property
    def queued(self) -> int:
        return len(self._waiters)

    @property
    def retry_after(self) -> float:
        """Seconds after which a request that is refused now may be admitted."""
        return self._queue.retry_after

    def arrive(self) -> int:
        """A request's place in the order of arrival, for all its attempts."""
        return next(self._orders)

    async def wait_ready(self) -> None:
        """Returns when there are workers to place requests on; raises why there are none."""
        if self._placer.obstacle:
            await self._membership.wait_until(self._is_final, self._config.placement_timeout)
        if obstacle := self._placer.obstacle:
            raise obstacle

    def _is_final(self) -> bool:
        """Whether waiting will not change whether requests can be placed."""
        obstacle = self._placer.obstacle
        return obstacle is None or isinstance(obstacle, LayoutMismatch)

    async def assign(self, order: int, state: RetryState, deadline: float = math.inf) -> Assignment:
        """Waits for workers with room. The caller counts the request on them at once. A request
        whose first token is predicted after the deadline is refused, unless it is a retry."""
        began = time.monotonic()
        left = math.inf if state.is_retry else deadline - began
        if state.suspicion is Suspicion.NONE:
            self._queue.join(order, retry=state.is_retry)
        else:
            self._suspects.add(order)
        waiter = self._waiters[order] = asyncio.Event()
        try:
            while True:
                found = self._find(order, state, left)
                if isinstance(found, Assignment):
                    self._queue.admitted(time.monotonic())
                    self._placer.placed += 1
                    self._metrics.queued("router", time.monotonic() - began)
                    return found
                give_up_at = self._give_up_at(found, began)
                if isinstance(found, FINAL) or give_up_at <= time.monotonic():
                    raise found
                await _wait(waiter, give_up_at)
                left = math.inf
        finally:
            self._queue.leave(order)
            self._suspects.discard(order)
            del self._waiters[order]
            # Later, when the caller has been counted on its workers.
            asyncio.get_running_loop().call_soon(self.wake)

    def wake(self) -> None:
        """Something changed: suspects look again, and then the head of the queue."""
        for order in (*sorted(self._suspects), self._queue.head):
            if order is not None:
                self._waiters[order].set()

    def _find(self, order: int, state: RetryState, seconds_left: float) -> Assignment | BatonError:
        found = self._placer.choose(state.work, state.suspicion, seconds_left)
        if not isinstance(found, BatonError):
            if order in self._suspects or order == self._queue.head:
                names = found.prefill, found.decode, found.fetch.holder if found.fetch else ""
                return Assignment(found, *map(self._membership.find, names))
            found = Exhausted("requests that came earlier are still waiting")
        found.retry_after = self._queue.retry_after
        return found

    def _membership_changed(self) -> None:
        if self._placer.obstacle is None:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = time.monotonic()
        self.wake()

    def _give_up_at(self, obstacle: BatonError, began: float) -> float:
        """Until when a request waits that has waited since `began`. Workers lost while it waits
        have as long to come back as if it had just arrived."""
        latest = began + self._config.queue_timeout
        if not isinstance(obstacle, Unavailable):
            return latest
        since = max(began, self._missing_since or began)
        return min(since + self._config.placement_timeout, max(latest, since))


async def _wait(event: asyncio.Event, until: float) -> None:
    """Returns when the event is set anew, or at `until`."""
    event.clear()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(until - time.monotonic()):
            await event.wait()

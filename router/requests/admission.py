"""Lets requests through to the workers, one after the other, as there is room for them.

A worker is sent a few requests beyond those that it has begun or promised pages
for; all others wait here, where they are seen, counted and bounded.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import time
from dataclasses import dataclass

from baton.core.config import RouterConfig
from baton.core.errors import BatonError, Exhausted, LayoutMismatch, Unavailable
from baton.router.observe.metrics import RouterMetrics
from baton.router.placement.placement import Placement, Suspicion
from baton.router.placement.placer import Placer
from baton.router.requests.retries import RetryState
from baton.router.workers.link import WorkerLink
from baton.router.workers.membership import Membership

SHORTEST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0
# Of the time between two admissions, how much the latest one says.
LATEST_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Assignment:
    """The workers of one attempt."""

    placement: Placement
    prefill: WorkerLink | None
    decode: WorkerLink | None
    # The worker that has pages which the prefill worker is to fetch.
    holder: WorkerLink | None = None

    @property
    def links(self) -> list[WorkerLink]:
        return [link for link in (self.prefill, self.decode) if link]

    @property
    def prefiller(self) -> WorkerLink:
        """The worker that reads the prompt."""
        link = self.prefill or self.decode
        assert link is not None
        return link

    @property
    def responder(self) -> WorkerLink:
        """The worker whose answer says that the request no longer waits there."""
        link = self.decode or self.prefill
        assert link is not None
        return link


class WaitQueue:
    """Requests that wait for a worker with room, in order of arrival. A retried request keeps its
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
        """The head has been assigned its workers."""
        if self._admitted_at is not None:
            self._interval += LATEST_SHARE * (now - self._admitted_at - self._interval)
        self._admitted_at = now


class Admission:
    def __init__(
        self,
        membership: Membership,
        placer: Placer,
        config: RouterConfig,
        metrics: RouterMetrics,
    ) -> None:
        self._membership = membership
        self._placer = placer
        self._config = config
        self._metrics = metrics
        self._queue = WaitQueue(config.max_queued)
        # Suspects may have to wait for each other. They stand aside, so that others do not wait
        # for them, and look first.
        self._aside: set[int] = set()
        self._orders = itertools.count()
        self._waiters: dict[int, asyncio.Event] = {}
        # Since when there have been no workers to place requests on; None while there are.
        self._missing_since: float | None = None
        membership.listen(self._look)

    @property
    def queued(self) -> int:
        return len(self._waiters)

    @property
    def retry_after(self) -> float:
        """Seconds after which a request that is refused now may be let in."""
        return self._queue.retry_after

    def arrive(self) -> int:
        """A request's place among all others, for as long as it lives."""
        return next(self._orders)

    async def wait_ready(self) -> None:
        """Returns when there are workers to place requests on; raises why there are none."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.placement_timeout):
                await self._membership.wait_until(self._is_settled)
        if obstacle := self._placer.obstacle:
            raise obstacle

    def _is_settled(self) -> bool:
        """Whether waiting will not change whether requests can be placed."""
        obstacle = self._placer.obstacle
        return obstacle is None or isinstance(obstacle, LayoutMismatch)

    async def assign(self, order: int, state: RetryState) -> Assignment:
        """Waits for workers with room. The caller counts the request on them at once."""
        began = time.monotonic()
        if state.suspicion is Suspicion.NONE:
            self._queue.join(order, retry=state.is_retry)
        else:
            self._aside.add(order)
        waiter = self._waiters[order] = asyncio.Event()
        self._count()
        try:
            while True:
                found = self._find(order, state)
                if isinstance(found, Assignment):
                    self._queue.admitted(time.monotonic())
                    self._placer.placed += 1
                    self._metrics.queued("router", time.monotonic() - began)
                    return found
                deadline = self._deadline(found, began)
                _raise_if_final(found, deadline - time.monotonic())
                await _wait(waiter, deadline)
        finally:
            self._queue.leave(order)
            self._aside.discard(order)
            del self._waiters[order]
            self._count()
            # Only once the caller has been counted: it runs before the next in line does.
            asyncio.get_running_loop().call_soon(self.wake)

    def wake(self) -> None:
        """Something changed: who stands aside looks again, and then the first in line."""
        for order in (*sorted(self._aside), self._queue.head):
            if order is not None:
                self._waiters[order].set()

    def _find(self, order: int, state: RetryState) -> Assignment | BatonError:
        found = self._placer.choose(state.next_work, state.suspicion)
        if isinstance(found, BatonError):
            return self._with_retry(found)
        if order not in self._aside and order != self._queue.head:
            return self._with_retry(Exhausted("requests that came earlier are still waiting"))
        names = found.prefill, found.decode, found.fetch.holder if found.fetch else ""
        return Assignment(found, *map(self._membership.find, names))

    def _with_retry(self, error: BatonError) -> BatonError:
        error.retry_after = self._queue.retry_after
        return error

    def _look(self) -> None:
        """A worker has come, gone or changed."""
        if self._placer.obstacle is None:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = time.monotonic()
        self.wake()

    def _deadline(self, obstacle: BatonError, began: float) -> float:
        """Until when a request waits that has waited since `began`. Workers that go while it
        waits for its turn have as long to come back as if it had come just then."""
        latest = began + self._config.queue_timeout
        if not isinstance(obstacle, Unavailable):
            return latest
        since = max(began, self._missing_since or began)
        return min(since + self._config.placement_timeout, max(latest, since))

    def _count(self) -> None:
        self._metrics.queued_requests.set(self.queued)


def _raise_if_final(obstacle: BatonError, remaining: float) -> None:
    if isinstance(obstacle, LayoutMismatch) or remaining <= 0:
        raise obstacle


async def _wait(event: asyncio.Event, deadline: float) -> None:
    """Returns when the event is set anew, or at the deadline."""
    event.clear()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline - time.monotonic()):
            await event.wait()

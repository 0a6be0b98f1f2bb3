"""Admits requests to workers as there is room for them: by priority, and within one fairly.

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
from typing import NamedTuple

from baton.core.config import RouterConfig
from baton.core.errors import BatonError, DeadlineExceeded, Exhausted, LayoutMismatch, Unavailable
from baton.router.observe.metrics import RouterMetrics
from baton.router.placement.placement import Placement, Suspicion
from baton.router.placement.placer import Placer
from baton.router.requests.retries import RetryState
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


class Place(NamedTuple):
    """A request's place in the wait queue, for all its attempts."""

    priority: int
    order: int  # of arrival
    tenant: str


class WaitQueue:
    """Requests that wait for a worker with room. The lowest priority is first; within one the
    tenants take turns, each with its requests in order of arrival. A retry keeps its request's
    place and is never refused. No I/O and no clock."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # By priority, then by tenant in the order of their turns.
        self._waiting: dict[int, dict[str, list[Place]]] = {}
        self._retries: set[Place] = set()
        self._size = 0
        self._admitted_at: float | None = None
        self._interval = 0.0  # between two admissions, smoothed

    def __len__(self) -> int:
        return self._size

    @property
    def head(self) -> Place | None:
        if not self._waiting:
            return None
        turns = self._waiting[min(self._waiting)]
        return next(iter(turns.values()))[0]

    @property
    def priorities(self) -> dict[int, int]:
        """How many wait with each priority, the first to be admitted first."""
        return {
            priority: sum(map(len, self._waiting[priority].values()))
            for priority in sorted(self._waiting)
        }

    @property
    def retry_after(self) -> float:
        """Seconds until the requests that wait now are likely to be admitted."""
        expected = self._interval * self._size
        return min(max(expected, SHORTEST_RETRY_SECONDS), LONGEST_RETRY_SECONDS)

    def join(self, place: Place, *, retry: bool = False) -> Place | None:
        """Returns the request that is refused in its place when the queue is full. Raises Exhausted
        where none gives way, unless the request is a retry."""
        displaced = None
        if retry:
            self._retries.add(place)
        elif self._size >= self._limit and not (displaced := self.displace(place)):
            raise Exhausted(
                f"{self._size} requests wait already; try again later",
                retry_after=self.retry_after,
            )
        own = self._waiting.setdefault(place.priority, {}).setdefault(place.tenant, [])
        bisect.insort(own, place)
        self._size += 1
        return displaced

    def displace(self, place: Place) -> Place | None:
        """Removes the last request of the tenant with most in the last priority, if that is behind
        the place's, or the same and its tenant has fewer: so none fills the queue for all."""
        last = max(self._waiting, default=place.priority)
        turns = self._waiting.get(last, {})
        longest = max(turns.values(), key=len, default=[])
        own = len(turns.get(place.tenant, ())) + 1 if last == place.priority else 0
        if last < place.priority or len(longest) <= own or longest[-1] in self._retries:
            return None
        displaced = longest[-1]
        self.leave(displaced)
        return displaced

    def leave(self, place: Place) -> None:
        """No effect when it is not in the queue."""
        turns = self._waiting.get(place.priority, {})
        own = turns.get(place.tenant, [])
        if place not in own:
            return
        own.remove(place)
        self._retries.discard(place)
        self._size -= 1
        if not own:
            del turns[place.tenant]
        if not turns:
            del self._waiting[place.priority]

    def admitted(self, place: Place, now: float) -> None:
        """The request has its workers: the next turn is another tenant's."""
        turns = self._waiting.get(place.priority, {})
        if place.tenant in turns:
            turns[place.tenant] = turns.pop(place.tenant)
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
        self._suspects: set[Place] = set()
        self._orders = itertools.count()
        self._waiters: dict[Place, asyncio.Event] = {}
        self._displaced: set[Place] = set()
        # Since when no request can be placed; None while one can.
        self._missing_since: float | None = None
        membership.listen(self._membership_changed)

    @property
    def queued(self) -> int:
        return len(self._waiters)

    @property
    def priorities(self) -> dict[int, int]:
        return self._queue.priorities

    @property
    def retry_after(self) -> float:
        """Seconds after which a request that is refused now may be admitted."""
        return self._queue.retry_after

    def arrive(self, priority: int = 0, tenant: str = "") -> Place:
        return Place(priority, next(self._orders), tenant)

    def make_room(self, priority: int, tenant: str) -> bool:
        """Refuses a waiting request in favour of one that arrives, if there is one to give way."""
        return self._refuse(self._queue.displace(self.arrive(priority, tenant)))

    def _refuse(self, displaced: Place | None) -> bool:
        if displaced is None:
            return False
        self._displaced.add(displaced)
        self._waiters[displaced].set()
        return True

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

    async def assign(
        self, place: Place, state: RetryState, deadline: float = math.inf
    ) -> Assignment:
        """Waits for workers with room. The caller counts the request on them at once. A request
        whose first token is predicted after the deadline is refused, unless it is a retry."""
        began = time.monotonic()
        left = math.inf if state.is_retry else deadline - began
        if state.suspicion is Suspicion.NONE:
            self._refuse(self._queue.join(place, retry=state.is_retry))
        else:
            self._suspects.add(place)
        waiter = self._waiters[place] = asyncio.Event()
        try:
            while True:
                found = self._find(place, state, left)
                if isinstance(found, Assignment):
                    self._queue.admitted(place, time.monotonic())
                    self._placer.placed += 1
                    self._metrics.queued("router", time.monotonic() - began)
                    return found
                give_up_at = self._give_up_at(found, began)
                if isinstance(found, FINAL) or give_up_at <= time.monotonic():
                    raise found
                await _wait(waiter, give_up_at)
                if place in self._displaced:
                    raise Exhausted(
                        "requests of others go first, and the queue is full; try again later",
                        retry_after=self._queue.retry_after,
                    )
                left = math.inf
        finally:
            self._queue.leave(place)
            self._suspects.discard(place)
            self._displaced.discard(place)
            del self._waiters[place]
            # Later, when the caller has been counted on its workers.
            asyncio.get_running_loop().call_soon(self.wake)

    def wake(self) -> None:
        """Something changed: suspects look again, and then the head of the queue."""
        for place in (*sorted(self._suspects), self._queue.head):
            if place is not None:
                self._waiters[place].set()

    def _find(
        self, place: Place, state: RetryState, seconds_left: float
    ) -> Assignment | BatonError:
        found = self._placer.choose(state.work, state.suspicion, seconds_left)
        if not isinstance(found, BatonError):
            if place in self._suspects or place == self._queue.head:
                names = found.prefill, found.decode, found.fetch.holder if found.fetch else ""
                return Assignment(found, *map(self._membership.find, names))
            found = Exhausted("requests that go first are still waiting")
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

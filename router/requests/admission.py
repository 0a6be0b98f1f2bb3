"""Admits requests to workers with capacity, by priority and, within one, in turns of the tenants.

A worker gets a few requests beyond those that it has begun or reserved pages for. All others wait
here, in a bounded and visible queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from dataclasses import dataclass

from baton.core.config import RouterConfig
from baton.core.errors import BatonError, DeadlineExceeded, Exhausted, LayoutMismatch, Unavailable
from baton.core.types import Request, Work
from baton.router.observe.metrics import RouterMetrics
from baton.router.placement.placement import Placement, Suspicion
from baton.router.placement.placer import Placer
from baton.router.requests.retries import RetryState
from baton.router.requests.wait_queue import Place, WaitQueue
from baton.router.workers.link import WorkerLink
from baton.router.workers.membership import Membership

# Errors that waiting does not change.
FINAL = (LayoutMismatch, DeadlineExceeded)

CAUTION = 0.5
"""Share added to the predicted wait of an arriving request, so that few requests are queued and
refused later."""


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
        self.service = self._queue.service
        self._longest_wait = min(config.queue_timeout, config.ttft or math.inf)
        # Suspects may have to wait for each other. They wait outside the queue, so that others do
        # not wait for them, and are tried first.
        self._suspects: set[Place] = set()
        self._orders = itertools.count()
        self._waiters: dict[Place, asyncio.Event] = {}
        self._displaced: set[Place] = set()
        # The time since which no request can be placed; None while requests can be placed.
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
        """Seconds after which a request refused now may be admitted."""
        return self._queue.retry_after

    def arrive(self, priority: int = 0, tenant: str = "") -> Place:
        return Place(priority, next(self._orders), tenant)

    def check_wait(self, request: Request) -> None:
        """Refuses a request that would wait too long, before its prompt is tokenized."""
        now = time.monotonic()
        wait = self._expected_wait(Place(request.priority, 0, request.tenant), now)
        if now + (1.0 + CAUTION) * wait > request.deadline:
            raise DeadlineExceeded(
                f"requests that arrive now would wait {wait:.2f} seconds, and the deadline leaves"
                f" {max(request.deadline - now, 0.0):.2f}",
                retry_after=self._queue.retry_after,
            )

    def make_room(self, priority: int, tenant: str, answers: int) -> bool:
        """Refuses waiting answers in favour of as many arriving ones. Returns False, and refuses
        none, if fewer give way."""
        answers -= len(self._displaced)  # these are about to leave
        displaced = self._queue.displace(self.arrive(priority, tenant), answers)
        self._refuse(displaced)
        return len(displaced) >= answers

    def _refuse(self, displaced: list[Place]) -> None:
        self._displaced.update(displaced)
        for each in displaced:
            self._waiters[each].set()

    async def wait_ready(self) -> None:
        """Returns once requests can be placed. Raises the obstacle after `placement_timeout`."""
        if self._placer.obstacle:
            await self._membership.wait_until(self._is_final, self._config.placement_timeout)
        if obstacle := self._placer.obstacle:
            raise obstacle

    def _is_final(self) -> bool:
        """True if requests can be placed, or if waiting cannot help."""
        obstacle = self._placer.obstacle
        return obstacle is None or isinstance(obstacle, LayoutMismatch)

    async def assign(
        self, place: Place, state: RetryState, deadline: float = math.inf
    ) -> Assignment:
        """Waits for workers with capacity. The caller must count the request on them at once.
        Unless it is a retry, a request is refused at once if it is predicted to wait too long or
        to miss its deadline."""
        began = time.monotonic()
        deadline = math.inf if state.is_retry else deadline
        wait = caution = 0.0
        if not state.is_retry:
            wait, caution = self._expected_wait(place, began), CAUTION
            self._check_first_token(state.work, wait)
        if state.suspicion is Suspicion.NONE:
            self._refuse(self._queue.join(place, began, retry=state.is_retry))
        else:
            self._suspects.add(place)
        waiter = self._waiters[place] = asyncio.Event()
        try:
            while True:
                now = time.monotonic()
                found = self._find(place, state, deadline - now, wait, caution)
                if isinstance(found, Assignment):
                    self._queue.admitted(place, now)
                    self._placer.note_placed(now)
                    self._metrics.queued("router", now - began)
                    return found
                give_up_at = self._give_up_at(found, began)
                if isinstance(found, FINAL) or give_up_at <= now:
                    raise found
                self._queue.wait(place, now)
                await _wait(waiter, give_up_at)
                if place in self._displaced:
                    raise Exhausted(
                        "requests of others go first, and the queue is full; try again later",
                        retry_after=self._queue.retry_after,
                    )
                wait = caution = 0.0
        finally:
            self._queue.leave(place)
            self._suspects.discard(place)
            self._displaced.discard(place)
            del self._waiters[place]
            # Deferred until the caller has counted the request on its workers.
            asyncio.get_running_loop().call_soon(self.wake)

    def _expected_wait(self, place: Place, now: float) -> float:
        """Predicts the wait. Raises Exhausted if, with CAUTION, it exceeds the limit."""
        seconds = self._queue.expected_wait(place, now)
        if (1.0 + CAUTION) * seconds > self._longest_wait:
            raise Exhausted(
                f"requests that arrive now would wait {seconds:.1f} seconds, and"
                f" {self._longest_wait:g} is the limit; try again later",
                retry_after=self._queue.retry_after,
            )
        return seconds

    def _check_first_token(self, work: Work, wait: float) -> None:
        """Raises Exhausted if requests ahead of this one would make its first token miss the TTFT
        objective. A prompt whose own compute takes more than half of it may still wait half."""
        if not self._config.ttft:
            return
        first = self._placer.first_token(work)
        longest = max(self._config.ttft - first.own, self._config.ttft / 2)
        if (1.0 + CAUTION) * (wait + first.waiting) > longest:
            raise Exhausted(
                f"the first token is predicted in {wait + first.total:.1f} seconds, and the"
                f" objective is {self._config.ttft:g}; try again later",
                retry_after=self._queue.retry_after,
            )

    def wake(self) -> None:
        """Lets suspects, then the head of the queue, try again after a change."""
        for place in (*sorted(self._suspects), self._queue.head):
            if place is not None:
                self._waiters[place].set()

    def _find(
        self, place: Place, state: RetryState, seconds_left: float, wait: float, caution: float
    ) -> Assignment | BatonError:
        """Returns workers, or why there are none. `wait` is the predicted wait in the queue."""
        found = self._placer.choose(state.work, state.suspicion, seconds_left, wait, caution)
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
        """Returns when a request that has waited since `began` gives up. Workers that are lost
        meanwhile have the whole `placement_timeout` to come back."""
        latest = began + self._config.queue_timeout
        if not isinstance(obstacle, Unavailable):
            return latest
        since = max(began, self._missing_since or began)
        return min(since + self._config.placement_timeout, max(latest, since))


async def _wait(event: asyncio.Event, until: float) -> None:
    """Clears the event, and returns when it is set or at `until`."""
    event.clear()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(until - time.monotonic()):
            await event.wait()

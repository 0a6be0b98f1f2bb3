"""Lets requests through to the workers, one after the other, as there is room for them.

A worker is sent a few requests beyond those that it has begun or promised pages
for; all others wait here, where they are seen, counted and bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from dataclasses import dataclass

from baton.core.config import RouterConfig
from baton.core.errors import BatonError, Exhausted, LayoutMismatch, Unavailable
from baton.router.observe.metrics import RouterMetrics
from baton.router.placement.placement import Placement, Suspicion
from baton.router.requests.life import RequestLife
from baton.router.requests.line import Line
from baton.router.workers.link import WorkerLink
from baton.router.workers.membership import Membership


@dataclass(frozen=True, slots=True)
class Seat:
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
    def reader(self) -> WorkerLink:
        """The worker that reads the prompt."""
        link = self.prefill or self.decode
        assert link is not None
        return link

    @property
    def first(self) -> WorkerLink:
        """The worker whose answer says that the request no longer waits there."""
        link = self.decode or self.prefill
        assert link is not None
        return link


class Admission:
    def __init__(
        self, membership: Membership, config: RouterConfig, metrics: RouterMetrics
    ) -> None:
        self._membership = membership
        self._config = config
        self._metrics = metrics
        self._line = Line(config.max_queued)
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
        return self._line.retry_after

    def arrive(self) -> int:
        """A request's place among all others, for as long as it lives."""
        return next(self._orders)

    async def wait_ready(self) -> None:
        """Returns when there are workers to place requests on; raises why there are none."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.placement_timeout):
                await self._membership.wait_until(self._is_settled)
        if obstacle := self._membership.obstacle:
            raise obstacle

    def _is_settled(self) -> bool:
        """Whether waiting will not change whether requests can be placed."""
        obstacle = self._membership.obstacle
        return obstacle is None or isinstance(obstacle, LayoutMismatch)

    async def seat(self, order: int, life: RequestLife) -> Seat:
        """Waits for workers with room. The caller counts the request on them at once."""
        began = time.monotonic()
        if life.suspicion is Suspicion.NONE:
            self._line.join(order, again=life.is_retry)
        else:
            self._aside.add(order)
        waiter = self._waiters[order] = asyncio.Event()
        self._count()
        try:
            while True:
                found = self._find(order, life)
                if isinstance(found, Seat):
                    self._line.admitted(time.monotonic())
                    self._membership.placed += 1
                    self._metrics.queued("router", time.monotonic() - began)
                    return found
                deadline = self._deadline(found, began)
                _raise_if_final(found, deadline - time.monotonic())
                await _wait(waiter, deadline)
        finally:
            self._line.leave(order)
            self._aside.discard(order)
            del self._waiters[order]
            self._count()
            # Only once the caller has been counted: it runs before the next in line does.
            asyncio.get_running_loop().call_soon(self.wake)

    def wake(self) -> None:
        """Something changed: who stands aside looks again, and then the first in line."""
        for order in (*sorted(self._aside), self._line.head):
            if order is not None:
                self._waiters[order].set()

    def _find(self, order: int, life: RequestLife) -> Seat | BatonError:
        found = self._membership.choose(life.next_work, life.suspicion)
        if isinstance(found, BatonError):
            return self._with_retry(found)
        if order not in self._aside and order != self._line.head:
            return self._with_retry(Exhausted("requests that came earlier are still waiting"))
        names = found.prefill, found.decode, found.fetch.holder if found.fetch else ""
        return Seat(found, *map(self._membership.find, names))

    def _with_retry(self, error: BatonError) -> BatonError:
        error.retry_after = self._line.retry_after
        return error

    def _look(self) -> None:
        """A worker has come, gone or changed."""
        if self._membership.obstacle is None:
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

"""The order in which requests are admitted, and how long each waits. No I/O and no clock.

A wait is predicted from how often requests are admitted, join and end.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from typing import NamedTuple

from baton.core.errors import Exhausted

SHORTEST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0

LEAST_FREE_SHARE = 0.01
"""The least share of admissions left to a request by those that join later and go first."""

MANY_PACES = 1000
"""Tenants above which idle ones are forgotten."""

MEMORY_SECONDS = 5.0
"""The time in which the weight of an interval between admissions falls to a third."""

SHORTEST_RATE_SECONDS = 1.0
"""The shortest time that a rate is measured over."""

REMEMBERED_SECONDS = 10.0
"""How long intervals are remembered while nothing waits."""

SERVICE_REQUESTS = 50
"""Requests in which the weight of one request's seconds on workers falls to a third."""

SERVICE_SECONDS = 1.0
"""Until admissions are measured, this many seconds of them are assumed, as often as requests
end."""


class Place(NamedTuple):
    """A request's place in the wait queue, for all its attempts."""

    priority: int
    order: int  # of arrival
    tenant: str


class ServicePace:
    """How often running requests end. Where all workers are busy, as many are admitted, so it is
    known how long a queue takes before anything was admitted from it."""

    def __init__(self) -> None:
        self.running = 0
        self._seconds = 0.0  # of one request, on average
        self._ended = 0

    def begin(self) -> None:
        self.running += 1

    def end(self, seconds: float) -> None:
        """A request ran for `seconds`."""
        self.running -= 1
        self._ended = min(self._ended + 1, SERVICE_REQUESTS)
        self._seconds += (seconds - self._seconds) / self._ended

    @property
    def rate(self) -> float:
        """Requests a second; 0 where it is not known."""
        return self.running / self._seconds if self._seconds else 0.0


class AdmissionPace:
    """The intervals between two admissions, measured while requests wait."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._squares = 0.0  # of these seconds
        self._intervals = 0.0
        self._changed_at = 0.0
        # The last admission, or when a request began to wait after all had been admitted. Requests
        # that leave without being admitted do not change it.
        self._since: float | None = None

    def interval(self, assumed_rate: float = 0.0) -> float:
        """On average, together with SERVICE_SECONDS at a rate that is assumed, if that is known."""
        seconds = self._seconds + (SERVICE_SECONDS if assumed_rate else 0.0)
        intervals = self._intervals + assumed_rate * SERVICE_SECONDS
        return seconds / intervals if intervals else 0.0

    def is_old(self, now: float) -> bool:
        return now - self._changed_at > REMEMBERED_SECONDS

    def wait(self, now: float, others: int) -> None:
        """A request waits beside others."""
        if not others and self.is_old(now):
            self._seconds = self._squares = self._intervals = 0.0
            self._since = None
        self._changed_at = now
        self._since = now if self._since is None else self._since

    def admitted(self, now: float, others: int) -> None:
        """One was admitted; the others wait."""
        if self._since is not None:
            latest = now - self._since
            kept = math.exp(-latest / MEMORY_SECONDS)
            self._seconds = kept * self._seconds + latest
            self._squares = kept * self._squares + min(latest, MEMORY_SECONDS) ** 2
            self._intervals = kept * self._intervals + 1.0
        self._changed_at = now
        self._since = now if others else None

    @property
    def until_admission(self) -> float:
        """Seconds to the next admission, on average over all moments: more than half of an average
        interval, since most moments are in long ones. Requests may be admitted many at a time."""
        return self._squares / (2.0 * self._seconds) if self._seconds else 0.0

    def since_admission(self, now: float) -> float:
        """For how long none was admitted while requests wait."""
        return 0.0 if self._since is None else now - self._since


class JoinRate:
    """How many requests join a second, recently."""

    def __init__(self) -> None:
        self._count = 0.0
        self._began = self._noted_at = -math.inf

    def note(self, now: float) -> None:
        if self.is_old(now):
            self._count, self._began = 0.0, now
        else:
            self._count = self._kept(now) * self._count + 1.0
        self._noted_at = now

    def is_old(self, now: float) -> bool:
        return now - self._noted_at > REMEMBERED_SECONDS

    def rate(self, now: float) -> float:
        seconds = MEMORY_SECONDS * -math.expm1((self._began - now) / MEMORY_SECONDS)
        return self._kept(now) * self._count / max(seconds, SHORTEST_RATE_SECONDS)

    def _kept(self, now: float) -> float:
        return math.exp((self._noted_at - now) / MEMORY_SECONDS)


class TenantPace:
    """How a tenant's requests of one priority join and are admitted."""

    def __init__(self) -> None:
        self.joins = JoinRate()
        # Some may be admitted while others are not.
        self.admissions = AdmissionPace()

    def expected_wait(self, now: float, own: int) -> float:
        """The wait behind `own` other requests of the tenant: at least the time since one of them
        was admitted."""
        if not own:
            return 0.0
        return max(own * self.admissions.interval(), self.admissions.since_admission(now))


class WaitQueue:
    """Requests that wait for a worker with room. The lowest priority is first; within one the
    tenants take turns, each with its requests in order of arrival. A retry keeps its request's
    place and is never refused."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # By priority, then by tenant in the order of their turns.
        self._waiting: dict[int, dict[str, list[Place]]] = {}
        self._retries: set[Place] = set()
        self._size = 0
        self.service = ServicePace()
        self._pace = AdmissionPace()
        self._joins: defaultdict[int, JoinRate] = defaultdict(JoinRate)  # by priority
        self._tenants: defaultdict[tuple[int, str], TenantPace] = defaultdict(TenantPace)

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

    def join(self, place: Place, now: float, *, retry: bool = False) -> Place | None:
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
        self._joins[place.priority].note(now)
        self._tenant(place, now).joins.note(now)
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

    def wait(self, place: Place, now: float) -> None:
        """The request, which is in the queue, could not be admitted yet."""
        self._pace.wait(now, self._size - 1)
        self._tenant(place, now).admissions.wait(now, self._count(place) - 1)

    def admitted(self, place: Place, now: float) -> None:
        """The request has its workers: the next turn is another tenant's."""
        turns = self._waiting.get(place.priority, {})
        if place.tenant in turns:
            turns[place.tenant] = turns.pop(place.tenant)
        self._pace.admitted(now, self._size - 1)
        self._tenant(place, now).admissions.admitted(now, self._count(place) - 1)

    def expected_wait(self, place: Place, now: float) -> float:
        """Seconds that a request which joins at this place would wait: at least the time since the
        last admission."""
        if not any(priority <= place.priority for priority in self._waiting):
            return 0.0
        expected = max(
            self._expected_wait(place, now),
            self._pace.until_admission,
            self._pace.since_admission(now),
        )
        if pace := self._tenants.get((place.priority, place.tenant)):
            expected = max(expected, pace.expected_wait(now, self._count(place)))
        return expected

    def _expected_wait(self, place: Place, now: float) -> float:
        """Counts the requests that go first, and those that join later and go first too: the larger
        solution of seconds = interval * (ahead + joining * seconds). Other tenants of its priority
        go first until they have had as many turns as its own, so `ahead` and `joining` depend on
        the seconds: starting at infinity, each iteration gives fewer."""
        own, interval = self._count(place), self._interval
        earlier = [each for each in self._waiting if each < place.priority]
        ahead = own + sum(n for each, n in self.priorities.items() if each < place.priority)
        joining = sum(self._joins[each].rate(now) for each in earlier)
        others = self._turns_of_others(place, now)
        expected = math.inf
        while True:
            behind = [(n, rate) for n, rate in others if n + rate * expected < own + 1]
            turns = (own + 1) * (len(others) - len(behind)) + sum(n for n, _ in behind)
            share = interval * (joining + sum(rate for _, rate in behind))
            seconds = interval * (ahead + turns) / max(1.0 - share, LEAST_FREE_SHARE)
            if seconds >= expected:
                return expected
            expected = seconds

    def _turns_of_others(self, place: Place, now: float) -> list[tuple[int, float]]:
        """How many requests of each other tenant wait with this priority, and join a second."""
        turns = self._waiting.get(place.priority, {})
        return [
            (len(waiting), self._tenants[place.priority, tenant].joins.rate(now))
            for tenant, waiting in turns.items()
            if tenant != place.tenant
        ]

    @property
    def _interval(self) -> float:
        return self._pace.interval(self.service.rate)

    def _count(self, place: Place) -> int:
        """How many of the tenant's wait with this priority."""
        return len(self._waiting.get(place.priority, {}).get(place.tenant, ()))

    def _tenant(self, place: Place, now: float) -> TenantPace:
        if len(self._tenants) > MANY_PACES:
            kept = {key: each for key, each in self._tenants.items() if not each.joins.is_old(now)}
            self._tenants = defaultdict(TenantPace, kept)
        return self._tenants[place.priority, place.tenant]

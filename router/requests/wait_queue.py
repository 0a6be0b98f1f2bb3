"""The order in which requests are admitted, and predictions of their waits. No I/O and no clock.

Waits are predicted from the rates at which requests join, are admitted and end.
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
"""Least assumed share of admissions that requests which join later and go first leave to others."""

MANY_PACES = 1000
"""With more tenants than this, idle ones are forgotten."""

MEMORY_SECONDS = 5.0
"""Time in which the weight of an interval between admissions decays to 1/e."""

SHORTEST_RATE_SECONDS = 1.0
"""The shortest time over which a rate is measured."""

REMEMBERED_SECONDS = 10.0
"""How long intervals are remembered while nothing waits."""

SERVICE_REQUESTS = 50
"""Number of ended requests in which the weight of one request's duration decays to 1/e."""

SERVICE_SECONDS = 1.0
"""Weight of the assumption that requests are admitted as often as they end, in seconds of measured
admissions."""


class Place(NamedTuple):
    """A request's place in the wait queue, kept for all its attempts."""

    priority: int
    order: int  # of arrival
    tenant: str


class ServicePace:
    """The rate at which running requests end. While all workers are busy, it is also the rate of
    admissions, so waits can be predicted before any admission from the queue."""

    def __init__(self) -> None:
        self.running = 0
        self._seconds = 0.0  # mean duration of a request
        self._ended = 0

    def begin(self) -> None:
        self.running += 1

    def end(self, seconds: float) -> None:
        """Counts a request that ran for `seconds`."""
        self.running -= 1
        self._ended = min(self._ended + 1, SERVICE_REQUESTS)
        self._seconds += (seconds - self._seconds) / self._ended

    @property
    def rate(self) -> float:
        """Requests per second; 0 if unknown."""
        return self.running / self._seconds if self._seconds else 0.0


class AdmissionPace:
    """The intervals between admissions, measured while requests wait."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._squares = 0.0  # sum of squared intervals
        self._intervals = 0.0
        self._changed_at = 0.0
        # Time of the last admission, or when a request began to wait in an empty queue. Requests
        # that leave without admission do not change it.
        self._since: float | None = None

    def interval(self, assumed_rate: float = 0.0) -> float:
        """Returns the mean interval. An assumed rate counts like SERVICE_SECONDS of
        measurements."""
        seconds = self._seconds + (SERVICE_SECONDS if assumed_rate else 0.0)
        intervals = self._intervals + assumed_rate * SERVICE_SECONDS
        return seconds / intervals if intervals else 0.0

    def is_old(self, now: float) -> bool:
        return now - self._changed_at > REMEMBERED_SECONDS

    def wait(self, now: float, others: int) -> None:
        """Notes that a request waits, besides `others`."""
        if not others and self.is_old(now):
            self._seconds = self._squares = self._intervals = 0.0
            self._since = None
        self._changed_at = now
        self._since = now if self._since is None else self._since

    def admitted(self, now: float, others: int) -> None:
        """Notes an admission, after which `others` still wait."""
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
        """Mean seconds to the next admission from a random moment. That is more than half a mean
        interval, since most moments are in long intervals: requests may be admitted in bursts."""
        return self._squares / (2.0 * self._seconds) if self._seconds else 0.0

    def since_admission(self, now: float) -> float:
        """Returns the seconds without an admission while requests wait."""
        return 0.0 if self._since is None else now - self._since


class JoinRate:
    """The recent rate at which requests join, per second."""

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
    """The rates at which a tenant's requests of one priority join and are admitted."""

    def __init__(self) -> None:
        self.joins = JoinRate()
        self.admissions = AdmissionPace()

    def expected_wait(self, now: float, own: int) -> float:
        """Predicts the wait behind `own` other requests of the tenant: at least the time since its
        last admission."""
        if not own:
            return 0.0
        return max(own * self.admissions.interval(), self.admissions.since_admission(now))


class WaitQueue:
    """Requests that wait for a worker with capacity. The lowest priority number goes first; within
    one, the tenants take turns, each with its requests in order of arrival. A retry keeps its
    request's place and is never refused."""

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
        """Number of waiting requests by priority, in order of admission."""
        return {
            priority: sum(map(len, self._waiting[priority].values()))
            for priority in sorted(self._waiting)
        }

    @property
    def retry_after(self) -> float:
        """Predicted seconds until the requests that wait now are admitted."""
        expected = self._interval * self._size
        return min(max(expected, SHORTEST_RETRY_SECONDS), LONGEST_RETRY_SECONDS)

    def join(self, place: Place, now: float, *, retry: bool = False) -> list[Place]:
        """Adds a request. If the queue is full, removes another and returns it, or raises Exhausted
        if none gives way. A retry always joins."""
        displaced: list[Place] = []
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

    def displace(self, place: Place, count: int = 1) -> list[Place]:
        """Removes `count` requests in favour of as many at `place`: each in the last priority, the
        latest one of the tenant with the most requests. In the same priority only if the place's
        tenant would have fewer, so that no tenant can fill the queue. Removes none if fewer give
        way."""
        waiting = self._waiting
        if count > 1:  # none may leave before enough are found
            waiting = {
                priority: {tenant: [*own] for tenant, own in turns.items()}
                for priority, turns in waiting.items()
            }
        displaced: list[Place] = []
        while len(displaced) < count:
            last = max(waiting, default=place.priority)
            turns = waiting.get(last, {})
            longest = max(turns.values(), key=len, default=[])
            own = len(turns.get(place.tenant, ())) + count if last == place.priority else 0
            if last < place.priority or len(longest) <= own or longest[-1] in self._retries:
                return []
            displaced.append(longest[-1])
            if count > 1:
                longest.pop()
                if not any(turns.values()):
                    del waiting[last]
        for each in displaced:
            self.leave(each)
        return displaced

    def leave(self, place: Place) -> None:
        """Removes a request, if it is in the queue."""
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
        """Notes that a queued request could not be admitted yet."""
        self._pace.wait(now, self._size - 1)
        self._tenant(place, now).admissions.wait(now, self._count_tenant(place) - 1)

    def admitted(self, place: Place, now: float) -> None:
        """Notes an admission. The next turn is another tenant's."""
        turns = self._waiting.get(place.priority, {})
        if place.tenant in turns:
            turns[place.tenant] = turns.pop(place.tenant)
        self._pace.admitted(now, self._size - 1)
        self._tenant(place, now).admissions.admitted(now, self._count_tenant(place) - 1)

    def expected_wait(self, place: Place, now: float) -> float:
        """Predicts the seconds that a request at this place would wait: at least the time since
        the last admission."""
        if not any(priority <= place.priority for priority in self._waiting):
            return 0.0
        expected = max(
            self._expected_wait(place, now),
            self._pace.until_admission,
            self._pace.since_admission(now),
        )
        if pace := self._tenants.get((place.priority, place.tenant)):
            expected = max(expected, pace.expected_wait(now, self._count_tenant(place)))
        return expected

    def _expected_wait(self, place: Place, now: float) -> float:
        """Counts the requests that go first, including some that join later: the larger solution
        of seconds = interval * (ahead + joining * seconds).

        Other tenants of the same priority go first until they have had as many turns as this one,
        so `ahead` and `joining` depend on the seconds: iterates down from infinity.
        """
        own, interval = self._count_tenant(place), self._interval
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
        """Returns, for each other tenant, its waiting requests of this priority and its join
        rate."""
        turns = self._waiting.get(place.priority, {})
        return [
            (len(waiting), self._tenants[place.priority, tenant].joins.rate(now))
            for tenant, waiting in turns.items()
            if tenant != place.tenant
        ]

    @property
    def _interval(self) -> float:
        return self._pace.interval(self.service.rate)

    def _count_tenant(self, place: Place) -> int:
        """Counts the tenant's waiting requests of this priority."""
        return len(self._waiting.get(place.priority, {}).get(place.tenant, ()))

    def _tenant(self, place: Place, now: float) -> TenantPace:
        if len(self._tenants) > MANY_PACES:
            kept = {key: each for key, each in self._tenants.items() if not each.joins.is_old(now)}
            self._tenants = defaultdict(TenantPace, kept)
        return self._tenants[place.priority, place.tenant]

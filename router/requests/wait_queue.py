"""The order in which requests are admitted, and how long each waits. No I/O and no clock."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from typing import NamedTuple

from baton.core.errors import Exhausted

SHORTEST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0

MEMORY_SECONDS = 5.0
"""After which an interval between admissions has a third of its weight."""

SHORTEST_RATE_SECONDS = 1.0
"""Over which a rate is measured."""

LEAST_FREE_SHARE = 0.01
"""Of the admissions, that earlier priorities leave to later ones."""

REMEMBERED_SECONDS = 10.0
"""For which intervals are remembered while nothing waits."""

MANY_PACES = 1000
"""From which on old ones are forgotten."""


class Place(NamedTuple):
    """A request's place in the wait queue, for all its attempts."""

    priority: int
    order: int  # of arrival
    tenant: str


class AdmissionPace:
    """The intervals between two admissions, measured while requests wait."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._intervals = 0.0
        self._changed_at = 0.0
        # The last admission, or when a request began to wait after all had been admitted. Requests
        # that leave without being admitted do not change it.
        self._since: float | None = None

    @property
    def interval(self) -> float:
        return self._seconds / self._intervals if self._intervals else 0.0

    def is_old(self, now: float) -> bool:
        return now - self._changed_at > REMEMBERED_SECONDS

    def wait(self, now: float, others: int) -> None:
        """A request waits beside others."""
        if not others and self.is_old(now):
            self._seconds, self._intervals, self._since = 0.0, 0.0, None
        self._changed_at = now
        self._since = now if self._since is None else self._since

    def admitted(self, now: float, others: int) -> None:
        """One was admitted; the others wait."""
        if self._since is not None:
            latest = now - self._since
            kept = math.exp(-latest / MEMORY_SECONDS)
            self._seconds = kept * self._seconds + latest
            self._intervals = kept * self._intervals + 1.0
        self._changed_at = now
        self._since = now if others else None

    def expected_wait(self, now: float, ahead: int) -> float:
        """Of a request behind `ahead` others: at least as long as none has been admitted."""
        if not ahead:
            return 0.0
        since = now if self._since is None else self._since
        return max(ahead * self.interval, now - since)


class JoinRate:
    """How many requests join a second, of late."""

    def __init__(self) -> None:
        self._count = 0.0
        self._began = self._noted_at = 0.0

    def note(self, now: float) -> None:
        if now - self._noted_at > REMEMBERED_SECONDS:
            self._count, self._began = 0.0, now
        self._count = self._kept(now) * self._count + 1.0
        self._noted_at = now

    def rate(self, now: float) -> float:
        seconds = MEMORY_SECONDS * -math.expm1((self._began - now) / MEMORY_SECONDS)
        return self._kept(now) * self._count / max(seconds, SHORTEST_RATE_SECONDS)

    def _kept(self, now: float) -> float:
        return math.exp((self._noted_at - now) / MEMORY_SECONDS)


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
        self._pace = AdmissionPace()
        # By priority.
        self._joins: defaultdict[int, JoinRate] = defaultdict(JoinRate)
        # By priority and tenant, since some may be admitted while others are not.
        self._paces: defaultdict[tuple[int, str], AdmissionPace] = defaultdict(AdmissionPace)

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
        expected = self._pace.interval * self._size
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
        if len(self._paces) > MANY_PACES:
            self._forget_paces(now)
        self._pace.wait(now, self._size - 1)
        self._paces[place.priority, place.tenant].wait(now, self._count(place) - 1)

    def admitted(self, place: Place, now: float) -> None:
        """The request has its workers: the next turn is another tenant's."""
        turns = self._waiting.get(place.priority, {})
        if place.tenant in turns:
            turns[place.tenant] = turns.pop(place.tenant)
        self._pace.admitted(now, self._size - 1)
        if pace := self._paces.get((place.priority, place.tenant)):
            pace.admitted(now, self._count(place) - 1)

    def expected_wait(self, place: Place, now: float) -> float:
        """The seconds for which a request would wait that joins at this place."""
        own = self._count(place)
        turns = self._waiting.get(place.priority, {}).values()
        ahead = sum(min(len(each), own + 1) for each in turns)
        earlier = sum(n for priority, n in self.priorities.items() if priority < place.priority)
        expected = self._pace.expected_wait(now, earlier + ahead) / self._free_share(place, now)
        if pace := self._paces.get((place.priority, place.tenant)):
            expected = max(expected, pace.expected_wait(now, own))
        return expected

    def _free_share(self, place: Place, now: float) -> float:
        """Of the admissions, those that requests of earlier priorities, which keep arriving, leave
        to this one."""
        earlier = (self._joins[each] for each in self._waiting if each < place.priority)
        rate = sum(joins.rate(now) for joins in earlier)
        return max(1.0 - rate * self._pace.interval, LEAST_FREE_SHARE)

    def _count(self, place: Place) -> int:
        """How many of the tenant's wait with this priority."""
        return len(self._waiting.get(place.priority, {}).get(place.tenant, ()))

    def _forget_paces(self, now: float) -> None:
        self._paces = defaultdict(
            AdmissionPace, {key: pace for key, pace in self._paces.items() if not pace.is_old(now)}
        )

"""How often requests are admitted and join: what a wait is predicted from. No I/O and no clock."""

from __future__ import annotations

import math

MEMORY_SECONDS = 5.0
"""After which an interval between admissions has a third of its weight."""

SHORTEST_RATE_SECONDS = 1.0
"""Over which a rate is measured."""

REMEMBERED_SECONDS = 10.0
"""For which intervals are remembered while nothing waits."""

SERVICE_REQUESTS = 50
"""After which a request's seconds on workers have a third of their weight."""

SERVICE_SECONDS = 1.0
"""Of admissions as often as requests end: what is assumed before admissions are measured."""


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
        """A request ran for so long."""
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
    """How many requests join a second, of late."""

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

"""Whether pages come back sooner than they are computed again.

Measured by the worker itself: the seconds a page took to copy, from each tier,
against the seconds a token took in steps that read prompts. The latest
measurements count the most. What was never measured is tried.
"""

from __future__ import annotations

import enum

KEEP = 0.9
"""What a measurement counts for, once another has come."""
FADE = 0.99
"""A tier that is found too slow is believed a little faster each time: it is tried again."""


class Tier(enum.StrEnum):
    """Where a page is that is not in the pool. The values are labels of metrics."""

    HOST = "host"
    FILES = "files"


class Pace:
    """Seconds a unit."""

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0

    @property
    def known(self) -> bool:
        return self._units > 0

    @property
    def each(self) -> float:
        """0 before the first measurement."""
        return self._seconds / self._units if self._units else 0.0

    def note(self, units: int, seconds: float) -> None:
        if units:
            self._units = KEEP * self._units + units
            self._seconds = KEEP * self._seconds + seconds

    def fade(self) -> None:
        self._seconds *= FADE


class RestoreCosts:
    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.compute = Pace()  # tokens
        self.copies = {tier: Pace() for tier in Tier}  # pages

    def pays(self, tiers: list[Tier], queued: list[Tier]) -> bool:
        """Whether pages of these tiers, behind those queued, come sooner than by compute."""
        if not self.compute.known:
            return True
        copy = sum(self.copies[tier].each for tier in (*queued, *tiers))
        if copy <= len(tiers) * self._page_size * self.compute.each:
            return True
        for tier in set(tiers):
            self.copies[tier].fade()
        return False

"""A sender's leave to start writes, for a time that answered beats renew.

Pure: whoever uses it says what time it is.
"""

from __future__ import annotations

import math

BEATS_PER_LEASE = 5


class WriteLease:
    """Until when writes may start, as far as answered beats say."""

    def __init__(self, seconds: float = 0.0, until: float = math.inf) -> None:
        self.seconds = seconds
        self.until = until  # before the first answer: how long to wait for it
        self.next_beat = math.inf
        self.beats = 0
        self._sent: dict[int, float] = {}  # beats without an answer, and when they left

    def beat(self, now: float) -> int:
        self.beats += 1
        self._sent[self.beats] = now
        self.next_beat = now + self.seconds / BEATS_PER_LEASE
        return self.beats

    def renew(self, number: int) -> bool:
        """False when the answer is to no beat that waits for one."""
        if number not in self._sent:
            return False
        self.until = max(self.until, self._sent[number] + self.seconds)
        self._sent = {beat: sent for beat, sent in self._sent.items() if beat > number}
        return True

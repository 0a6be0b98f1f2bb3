"""Whether a worker still lives, judged by what comes from it.

The router asks every worker at intervals (Ping), and its event loop answers,
whatever its engine computes meanwhile. Two conditions count as lost:

- frozen: nothing at all has come for some pings: a stopped process, a hung
  event loop, a host that is gone.
- stalled: pings are answered, but the engine, which has work, has not reported
  for much longer than any step takes.

Both are counted in pings and not in time: a router that was itself stopped for
a while finds its clock far ahead and the workers' answers still unread.
"""

from __future__ import annotations


class Pulse:
    def __init__(self, ping_seconds: float, frozen_seconds: float, stall_seconds: float) -> None:
        self._ping_seconds = ping_seconds
        self._frozen_seconds = frozen_seconds
        self._stall_seconds = stall_seconds
        self._silent_pings = 0
        self._stalled_pings = 0

    def heard(self) -> None:
        """Something came from the worker."""
        self._silent_pings = 0

    def reported(self) -> None:
        """Its engine reported."""
        self._stalled_pings = 0

    def ping(self, *, busy: bool) -> str:
        """Another ping is due, and the engine has work when `busy`. Why the worker counts as
        lost; empty when it does not."""
        self._silent_pings += 1
        self._stalled_pings = self._stalled_pings + 1 if busy else 0
        if self._silent_pings * self._ping_seconds > self._frozen_seconds:
            return f"it has not answered for {self._frozen_seconds:g} seconds"
        if self._stalled_pings * self._ping_seconds > self._stall_seconds:
            return f"its engine has not moved for {self._stall_seconds:g} seconds"
        return ""

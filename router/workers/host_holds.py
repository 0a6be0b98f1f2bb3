"""Which hosts serve requests at the moment: background requests pause on all cores there.

    idle ─a request is placed on a worker of the host─▶ busy: its CPU workers get Hold
      ▲                                                  │ its last request has ended
      └───────────────── LINGER_SECONDS later ───────────┘

A worker decides by itself which requests to serve first. But workers of one host may compute on the
same cores, where a background prompt on one would slow down the answers of another.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.router.workers.link import WorkerLink

LINGER_SECONDS = 0.25
"""A client often sends its next request when it has an answer."""


class HostHolds:
    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()  # by host
        self._busy: set[str] = set()
        self._workers: defaultdict[str, set[WorkerLink]] = defaultdict(set)
        self._listeners: list[Callable[[], None]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls `listener` when a host is no longer busy."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def is_busy(self, worker: WorkerLink) -> bool:
        """Whether a worker that was added shares cores with one that has requests."""
        return worker.host in self._busy and worker in self._workers[worker.host]

    def add(self, worker: WorkerLink) -> None:
        """A CPU worker has attached, or forgot what it was sent."""
        self._workers[worker.host].add(worker)
        if worker.host in self._busy:
            worker.hold(pause=True)

    def remove(self, worker: WorkerLink) -> None:
        self._workers[worker.host].discard(worker)

    def count(self, host: str, change: int) -> None:
        """Requests begin or end on a worker of the host, background ones aside."""
        self._requests[host] += change
        if self._requests[host]:
            self._set(host, busy=True)
        else:
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self._check, host)

    def _check(self, host: str) -> None:
        if not self._requests[host] and host in self._busy:
            self._set(host, busy=False)
            for listener in self._listeners:
                listener()

    def _set(self, host: str, *, busy: bool) -> None:
        if busy != (host in self._busy):
            self._busy ^= {host}
            for worker in self._workers[host]:
                worker.hold(pause=busy)

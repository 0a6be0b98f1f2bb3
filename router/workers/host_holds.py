"""Pauses background requests on hosts whose workers serve other requests.

    idle ─a request is placed on a worker of the host─▶ busy: its CPU workers get Hold
      ▲                                                  │ its last request has ended
      └───────────────── LINGER_SECONDS later ───────────┘

Each worker puts its own requests in order. But workers of one host may compute on the same cores,
where a background prompt on one worker would slow down answers of another.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.router.workers.link import WorkerLink

LINGER_SECONDS = 0.25
"""How long a host stays busy: a client often sends its next request after an answer."""


class HostHolds:
    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()  # by host
        self._busy: set[str] = set()
        self._workers: defaultdict[str, set[WorkerLink]] = defaultdict(set)
        self._listeners: list[Callable[[], None]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls `listener` whenever a host stops being busy."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def is_busy(self, worker: WorkerLink) -> bool:
        """True if the worker was added and another one on its host has requests."""
        return worker.host in self._busy and worker in self._workers[worker.host]

    def add(self, worker: WorkerLink) -> None:
        """Adds a CPU worker that has attached, and pauses it if its host is busy."""
        self._workers[worker.host].add(worker)
        if worker.host in self._busy:
            worker.hold(pause=True)

    def remove(self, worker: WorkerLink) -> None:
        self._workers[worker.host].discard(worker)

    def count(self, host: str, change: int) -> None:
        """Counts live requests that begin or end on a worker of the host."""
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

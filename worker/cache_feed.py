"""Tells routers which pages came into the prefix cache and which left it.

On the engine thread, between steps: what changed is collected by the cache and
sent at most every `SECONDS`, or when there is much of it. A router that was not
told something (the outbox drops what a slow one does not take) sees a gap in
the numbers and asks for everything.
"""

from __future__ import annotations

import math
import time

from baton.v1 import worker_pb2 as pb
from engine.prefix_cache import PrefixCache
from worker.outbox import Outbox

SECONDS = 0.05
MOST_KEYS = 2048
"""Changes that are not held back."""


class CacheFeed:
    def __init__(self, cache: PrefixCache, outbox: Outbox) -> None:
        self._cache = cache
        self._outbox = outbox
        self._number = 0
        self._published = -math.inf

    def publish(self, *, busy: bool) -> None:
        """Sends what changed, unless it is little and the engine goes on at once."""
        changed = self._cache.changed
        due = time.monotonic() - self._published >= SECONDS
        if changed and (due or changed >= MOST_KEYS or not busy):
            self._send_changes()

    def send_all(self, attachment: int) -> None:
        """Sends one router everything that is there. What changes later goes on from it."""
        if self._cache.changed:
            self._send_changes()
        whole = pb.CacheEvents(number=self._number, reset=True, stored=self._cache.keys)
        self._outbox.send(attachment, pb.WorkerMessage(cache_events=whole))

    def _send_changes(self) -> None:
        self._number += 1
        self._published = time.monotonic()
        changes = self._cache.take_changes()
        events = pb.CacheEvents(number=self._number, stored=changes.stored, evicted=changes.evicted)
        self._outbox.broadcast(pb.WorkerMessage(cache_events=events))

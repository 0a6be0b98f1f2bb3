"""Tells routers which pages came into the prefix cache, which left it for the second tier, and
which are gone.

On the engine thread, between steps: what changed is collected by the cache and
sent at most every `SECONDS`, or when there is much of it. A router that was not
told something (the outbox drops what a slow one does not take) sees a gap in
the numbers and asks for everything.
"""

from __future__ import annotations

import math
import time

from baton.engine.page_pool import PagePool
from baton.v1 import worker_pb2 as pb
from baton.worker.outbox import Outbox

SECONDS = 0.05
MOST_KEYS = 2048
"""Changes that are not held back."""


class CacheFeed:
    def __init__(self, pool: PagePool, outbox: Outbox) -> None:
        self._cache = pool.cache
        self._below = pool.second_tier
        self._outbox = outbox
        self._number = 0
        self._published = -math.inf

    def publish(self, *, busy: bool) -> None:
        """Sends what changed, unless it is little and the engine goes on at once."""
        changed = self._changed
        due = time.monotonic() - self._published >= SECONDS
        if changed and (due or changed >= MOST_KEYS or not busy):
            self._send_changes()

    def send_all(self, attachment: int) -> None:
        """Sends one router everything that is there. What changes later goes on from it."""
        if self._changed:
            self._send_changes()
        below = self._below.keys if self._below is not None else ()
        whole = pb.CacheEvents(
            number=self._number,
            reset=True,
            stored=self._cache.keys,
            kept=(key for key in below if key not in self._cache),
        )
        self._outbox.send(attachment, pb.WorkerMessage(cache_events=whole))

    @property
    def _changed(self) -> int:
        return self._cache.changed + (self._below.changed if self._below is not None else 0)

    def _send_changes(self) -> None:
        changes = self._cache.take_changes()
        events = pb.CacheEvents(stored=changes.stored)
        if self._below is None:
            events.evicted.extend(changes.evicted)
        else:
            below = self._below.take_changes()
            for key in {**changes.evicted, **below.stored, **below.evicted}:
                if key not in self._cache:
                    (events.kept if key in self._below else events.evicted).append(key)
        if events.ByteSize():  # what was only copied changes nothing for routers
            self._number += 1
            self._published = time.monotonic()
            events.number = self._number
            self._outbox.broadcast(pb.WorkerMessage(cache_events=events))

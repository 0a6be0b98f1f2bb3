"""Messages from the engine thread to the routers, and the feed of prefix-cache changes.

The engine thread collects messages while it works and hands them over in one
batch with `flush`; the event loop sorts them into one queue per router.
"""

from __future__ import annotations

import asyncio
import math
import time

from baton.core.page_keys import is_first_slice
from baton.engine.page_pool import PagePool
from baton.engine.second_tier import second_tier_of
from baton.v1 import worker_pb2 as pb

MAX_BACKLOG = 100_000
"""A router with this many queued messages is disconnected."""

CACHE_BACKLOG = 1_000
"""A router with this many queued messages gets no cache events."""

FEED_SECONDS = 0.05
"""Interval between cache events while the engine is busy."""

MOST_KEYS = 2048
"""With this many changed keys, events do not wait for the interval to end."""


class Outbox:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._collected: list[tuple[int | None, pb.WorkerMessage]] = []
        self._queues: dict[int, asyncio.Queue[pb.WorkerMessage | None]] = {}

    # Called by the engine thread.

    def send(self, attachment: int, message: pb.WorkerMessage) -> None:
        self._collected.append((attachment, message))

    def broadcast(self, message: pb.WorkerMessage) -> None:
        self._collected.append((None, message))

    def flush(self) -> None:
        if self._collected:
            batch, self._collected = self._collected, []
            self._loop.call_soon_threadsafe(self._sort, batch)

    # Called by the event loop.

    def attach(self, attachment: int) -> asyncio.Queue[pb.WorkerMessage | None]:
        """Returns the queue of one router's stream. None ends the stream."""
        queue: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()
        self._queues[attachment] = queue
        return queue

    def detach(self, attachment: int) -> None:
        self._queues.pop(attachment, None)

    def broadcast_now(self, message: pb.WorkerMessage) -> None:
        """Queues the message after everything that the engine thread has flushed."""
        self._sort([(None, message)])

    def close(self) -> None:
        """Asks every router to end its stream, once the queue has been written."""
        for queue in self._queues.values():
            queue.put_nowait(None)

    def _sort(self, batch: list[tuple[int | None, pb.WorkerMessage]]) -> None:
        for attachment, message in batch:
            if attachment is None:
                for each in list(self._queues):
                    self._put(each, message)
            elif attachment in self._queues:
                self._put(attachment, message)

    def _put(self, attachment: int, message: pb.WorkerMessage) -> None:
        queue = self._queues[attachment]
        if queue.qsize() >= CACHE_BACKLOG and message.HasField("cache_events"):
            return  # the router sees the gap in the numbers, and asks for a resync
        if queue.qsize() < MAX_BACKLOG:
            queue.put_nowait(message)
        else:
            self.detach(attachment)
            queue.put_nowait(None)


class CacheFeed:
    """Sends routers the changes of the prefix cache and the second tier.

    Used by the engine thread, between steps. A router that missed a message sees a gap in the
    numbers and asks for the whole cache.
    """

    def __init__(self, pool: PagePool, outbox: Outbox) -> None:
        self._cache = pool.cache
        self._second_tier = second_tier_of(pool)
        self._outbox = outbox
        self._number = 0
        self._published = -math.inf

    def publish(self, *, busy: bool) -> None:
        """Sends the changes, unless they are few and the engine is about to run a step."""
        changed = self._changed
        due = time.monotonic() - self._published >= FEED_SECONDS
        if changed and (due or changed >= MOST_KEYS or not busy):
            self._send_changes()

    def send_all(self, attachment: int) -> None:
        """Sends one router the whole cache. Later changes continue from it."""
        if self._changed:
            self._send_changes()
        kept = self._second_tier.keys if self._second_tier is not None else ()
        whole = pb.CacheEvents(
            number=self._number,
            reset=True,
            stored=filter(is_first_slice, self._cache.keys),
            kept=(key for key in filter(is_first_slice, kept) if key not in self._cache),
        )
        self._outbox.send(attachment, pb.WorkerMessage(cache_events=whole))

    @property
    def _changed(self) -> int:
        tier = self._second_tier
        return len(self._cache.changes) + (len(tier.changes) if tier is not None else 0)

    def _send_changes(self) -> None:
        tier = self._second_tier
        changes = self._cache.changes.drain()
        first = filter(is_first_slice, changes)
        events = pb.CacheEvents(stored=(key for key in first if key in self._cache))
        for key in {**changes, **(tier.changes.drain() if tier is not None else {})}:
            if key not in self._cache and is_first_slice(key):
                is_kept = tier is not None and key in tier
                (events.kept if is_kept else events.evicted).append(key)
        if events.ByteSize():  # empty when pages were only copied to the second tier
            self._number += 1
            self._published = time.monotonic()
            events.number = self._number
            self._outbox.broadcast(pb.WorkerMessage(cache_events=events))

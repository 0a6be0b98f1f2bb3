"""Messages from the engine thread to the routers.

The engine thread collects them while it works and hands them over in one
piece with `flush`; the event loop then sorts them into one queue a router.
"""

from __future__ import annotations

import asyncio

from baton.v1 import worker_pb2 as pb

MAX_BACKLOG = 100_000
"""Messages that may wait for one router before it is cut off."""

CACHE_BACKLOG = 1_000
"""Messages that may wait for one router before it is told nothing more about the cache."""


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
        """The queue of one router's stream. None in it means: cut off."""
        queue: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()
        self._queues[attachment] = queue
        return queue

    def detach(self, attachment: int) -> None:
        self._queues.pop(attachment, None)

    def tell_all(self, message: pb.WorkerMessage) -> None:
        """After all that the engine thread has flushed."""
        self._sort([(None, message)])

    def close(self) -> None:
        """Cuts every router off, once what is queued for it has been written."""
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
            return  # it will see the gap, and ask
        if queue.qsize() < MAX_BACKLOG:
            queue.put_nowait(message)
        else:
            self.detach(attachment)
            queue.put_nowait(None)

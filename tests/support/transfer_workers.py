"""A pool and its transfer thread, driven by hand."""

from __future__ import annotations

import queue
from typing import TypeVar

from baton.core.types import AttemptKey
from baton.kv_transfer.pool_layout import PeerDigest
from baton.kv_transfer.transfer_events import ExpectPages, TransferEvent
from baton.kv_transfer.transfer_thread import TransferThread
from baton.kv_transfer.transport import PoolMemory, Transport
from baton.v1.transfer_pb2 import PoolLayout

KEY = AttemptKey("request", 1)
EVENT_SECONDS = 20.0

Event = TypeVar("Event", bound=TransferEvent)


class TransferWorker:
    """Serves `memory`; its thread's events wait in a queue."""

    def __init__(
        self,
        transport: Transport,
        memory: PoolMemory,
        layout: PoolLayout,
        digest: PeerDigest | None,
        lease_seconds: float = 1.0,
    ) -> None:
        self.events: queue.Queue[TransferEvent] = queue.Queue()
        self.thread = TransferThread(
            *(transport, memory, layout, self.events.put),
            digest=digest,
            lease_seconds=lease_seconds,
        )
        self.thread.start()

    @property
    def agent(self) -> str:
        return self.thread.pool_address.agent

    def next(self, kind: type[Event]) -> Event:
        event = self.events.get(timeout=EVENT_SECONDS)
        assert isinstance(event, kind), event
        return event

    def ticket(self, pages: list[int], key: AttemptKey = KEY, expires: float = 30.0) -> bytes:
        return self.thread.ticket(key, pages, expires)

    def reserve(
        self, pages: list[int], sender: str, *, expires: float = 30.0, key: AttemptKey = KEY
    ) -> bytes:
        """The ticket that lets the agent `sender` write into `pages`."""
        self.thread.post(ExpectPages(key, sender, pages, expires))
        return self.ticket(pages, key, expires)

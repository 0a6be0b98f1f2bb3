"""All pushes of one prefill worker: carries out what their senders decide.

Used by the transfer thread alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from baton.v1.transfer_pb2 import PoolAddress, PoolLayout
from core.errors import BatonError, LayoutMismatch
from core.types import AttemptKey
from kv_transfer.events import PeerConnected, PeerDisconnected, PushEnded, TransferEvent
from kv_transfer.layout import describe_mismatch
from kv_transfer.note import drained_note
from kv_transfer.sender import Action, Ended, Sender, SendNote, StartWrite
from kv_transfer.ticket import open_ticket
from kv_transfer.transport import Transport

_now = time.monotonic


class Pushes:
    """The open pushes, the writes under way, and the decode workers they may go to."""

    def __init__(
        self,
        transport: Transport,
        layout: PoolLayout,
        page_bytes: int,
        deliver: Callable[[TransferEvent], None],
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._page_bytes = page_bytes
        self._deliver = deliver
        self._senders: dict[AttemptKey, Sender] = {}
        self._writes: dict[int, AttemptKey] = {}
        self._agents: dict[str, str] = {}  # by worker_id

    @property
    def open(self) -> bool:
        return bool(self._senders)

    @property
    def writing(self) -> bool:
        """Whether the transport has something to report soon."""
        return bool(self._writes)

    @property
    def deadline(self) -> float:
        """When `tick` has something to do; infinity when never."""
        return min((sender.deadline for sender in self._senders.values()), default=math.inf)

    def connect(self, worker_id: str, address: PoolAddress) -> None:
        try:
            agent = self._connect(address)
        except BatonError as error:
            self._deliver(PeerConnected(worker_id, address.agent, error))
        else:
            self._replace_agent(worker_id, agent)
            self._deliver(PeerConnected(worker_id, agent, None))

    def begin(self, key: AttemptKey, peer: str) -> None:
        self._senders[key] = Sender(key, peer, self._page_bytes)

    def ticket(self, key: AttemptKey, sealed: bytes) -> None:
        sender = self._senders.get(key)
        try:
            body = open_ticket(sealed, self._layout)
        except BatonError as error:
            if sender is not None:
                self._perform(key, sender.fail(error))
            return
        if sender is not None:
            self._perform(key, sender.ticket(body, _now()))
        else:
            # The push is over, or never was: the receiver need not wait for it.
            self._perform(key, [SendNote(body.agent, drained_note(key))])

    def pages(self, key: AttemptKey, pages: Sequence[int]) -> None:
        if sender := self._senders.get(key):
            self._perform(key, sender.pages_ready(pages, _now()))

    def finish(
        self, key: AttemptKey, first_token: int, pages: Sequence[int], finished_at: float
    ) -> None:
        if sender := self._senders.get(key):
            self._perform(key, sender.finish(first_token, pages, finished_at, _now()))

    def cancel(self, key: AttemptKey) -> None:
        if sender := self._senders.get(key):
            self._perform(key, sender.cancel())

    def cancel_all(self) -> None:
        for key in list(self._senders):
            self.cancel(key)

    def write_done(self, write: int) -> None:
        if key := self._writes.pop(write, None):
            self._perform(key, self._senders[key].write_done(_now()))

    def write_failed(self, write: int, error: BatonError) -> None:
        if key := self._writes.pop(write, None):
            self._perform(key, self._senders[key].write_failed(error, _now()))

    def peer_lost(self, peer: str) -> None:
        for key, sender in list(self._senders.items()):
            if sender.peer == peer:
                self._perform(key, sender.peer_lost())
        for worker_id in [name for name, agent in self._agents.items() if agent == peer]:
            del self._agents[worker_id]
            self._deliver(PeerDisconnected(worker_id, peer))

    def tick(self) -> None:
        now = _now()
        if now < self.deadline:
            return
        for key, sender in list(self._senders.items()):
            self._perform(key, sender.tick(now))

    def _connect(self, address: PoolAddress) -> str:
        if mismatch := describe_mismatch(self._layout, address.layout):
            raise LayoutMismatch(f"the pools are laid out differently: {mismatch}")
        return self._transport.connect(address)

    def _replace_agent(self, worker_id: str, agent: str) -> None:
        """A worker that restarted has a new agent; the old one is forgotten once it is idle."""
        old = self._agents.get(worker_id, agent)
        self._agents[worker_id] = agent
        if old != agent and all(sender.peer != old for sender in self._senders.values()):
            self._transport.disconnect(old)

    def _perform(self, key: AttemptKey, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case StartWrite():
                    self._start_write(key, action)
                case SendNote():
                    with suppress(BatonError):  # nobody is left to tell
                        self._transport.write(action.peer, (), (), action.note)
                case Ended():
                    del self._senders[key]
                    self._deliver(
                        PushEnded(
                            key, action.error, action.bytes, action.seconds, action.exposed_seconds
                        )
                    )

    def _start_write(self, key: AttemptKey, write: StartWrite) -> None:
        try:
            number = self._transport.write(
                write.peer, write.local_pages, write.remote_pages, write.note
            )
        except BatonError as error:
            self._perform(key, self._senders[key].write_failed(error, _now()))
        else:
            self._writes[number] = key

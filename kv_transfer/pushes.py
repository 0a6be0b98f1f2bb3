"""All pushes of one prefill worker: carries out what their senders decide.

Used by the transfer thread alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

from baton.v1.transfer_pb2 import PoolAddress, PoolLayout, TransferNote
from core.errors import BatonError, LayoutMismatch
from core.types import AttemptKey
from kv_transfer.digest import PageDigest
from kv_transfer.events import (
    PagesOverdue,
    PeerConnected,
    PeerDisconnected,
    PushEnded,
    PushFailed,
    TransferEvent,
)
from kv_transfer.layout import describe_mismatch
from kv_transfer.note import drained_note, introduction_note, key_of
from kv_transfer.sender import (
    Action,
    Ended,
    Fail,
    Introduce,
    Overdue,
    Sender,
    SendNote,
    StartWrite,
)
from kv_transfer.ticket import open_ticket
from kv_transfer.transport import Transport


class Pushes:
    """The open pushes, the writes under way, and the decode workers they may go to."""

    def __init__(
        self,
        transport: Transport,
        address: PoolAddress,
        digest: PageDigest | None,
        deliver: Callable[[TransferEvent], None],
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._address = address
        self._digest = digest
        self._deliver = deliver
        self._clock = clock
        self._senders: dict[AttemptKey, Sender] = {}
        self._writes: dict[int, AttemptKey] = {}
        self._agents: dict[str, str] = {}  # by worker_id

    @property
    def open(self) -> bool:
        return bool(self._senders)

    @property
    def expecting(self) -> bool:
        """Whether the transport has something to report soon."""
        return any(sender.expects for sender in self._senders.values())

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
            self._introduce(agent)
            self._deliver(PeerConnected(worker_id, agent, None))

    def begin(self, key: AttemptKey, peer: str) -> None:
        self._senders[key] = Sender(key, peer, self._address.page_bytes)

    def ticket(self, key: AttemptKey, sealed: bytes) -> None:
        sender = self._senders.get(key)
        try:
            body = open_ticket(sealed, self._layout)
        except BatonError as error:
            if sender is not None:
                self._perform(key, sender, sender.fail(error))
            return
        if sender is not None:
            self._perform(key, sender, sender.ticket(body, self._clock()))
        else:
            # The push is over, or never was: the receiver need not wait for it.
            self._send(body.agent, drained_note(key))

    def pages(self, key: AttemptKey, pages: Sequence[int]) -> None:
        if sender := self._senders.get(key):
            digests = self._digests(pages)
            self._perform(key, sender, sender.pages_ready(pages, self._clock(), digests))

    def finish(
        self, key: AttemptKey, first_token: int, pages: Sequence[int], finished_at: float
    ) -> None:
        if sender := self._senders.get(key):
            digests = self._digests(pages)
            actions = sender.finish(first_token, pages, finished_at, self._clock(), digests)
            self._perform(key, sender, actions)

    def cancel(self, key: AttemptKey) -> None:
        if sender := self._senders.get(key):
            self._perform(key, sender, sender.cancel())

    def cancel_all(self) -> None:
        for key in list(self._senders):
            self.cancel(key)

    def noted(self, peer: str, note: TransferNote) -> None:
        """A receiver's note. One of an unknown attempt matches nothing."""
        key = key_of(note)
        sender = self._senders.get(key)
        if sender is not None and sender.peer == peer:
            self._perform(key, sender, self._hear(sender, note))
        elif note.HasField("revoked"):
            # Its push is over; the receiver may have missed that.
            self._send(peer, drained_note(key))

    def write_done(self, write: int) -> None:
        if key := self._writes.pop(write, None):
            sender = self._senders[key]
            self._perform(key, sender, sender.write_done(self._clock()))

    def write_failed(self, write: int, error: BatonError) -> None:
        if key := self._writes.pop(write, None):
            sender = self._senders[key]
            self._perform(key, sender, sender.write_failed(error, self._clock()))

    def peer_lost(self, peer: str) -> None:
        for key, sender in list(self._senders.items()):
            if sender.peer == peer:
                self._perform(key, sender, sender.peer_lost())
        for worker_id in [name for name, agent in self._agents.items() if agent == peer]:
            del self._agents[worker_id]
            self._deliver(PeerDisconnected(worker_id, peer))

    def tick(self) -> None:
        now = self._clock()
        for key, sender in list(self._senders.items()):
            if now >= sender.deadline:
                self._perform(key, sender, sender.tick(now))

    @property
    def _layout(self) -> PoolLayout:
        return self._address.layout

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

    def _introduce(self, peer: str) -> None:
        self._send(peer, introduction_note(self._address))

    def _digests(self, pages: Sequence[int]) -> list[int]:
        return self._digest(pages) if self._digest else []

    def _hear(self, sender: Sender, note: TransferNote) -> list[Action]:
        match note.WhichOneof("kind"):
            case "renewed":
                return sender.renewed(note.renewed.number, self._clock())
            case "revoked":
                return sender.revoked()
            case "resend":
                return sender.resend(note.resend, self._clock())
            case "accepted":
                return sender.accepted()
            case _:
                return []

    def _perform(self, key: AttemptKey, sender: Sender, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case StartWrite():
                    self._start_write(key, sender, action)
                case SendNote():
                    self._send_for(key, sender, action.note)
                case Introduce():
                    self._introduce(sender.peer)
                case Fail():
                    self._deliver(PushFailed(key, action.error))
                case Overdue():
                    self._deliver(PagesOverdue(key))
                case Ended():
                    del self._senders[key]
                    times = action.seconds, action.exposed_seconds
                    self._deliver(PushEnded(key, action.error, action.bytes, *times))

    def _start_write(self, key: AttemptKey, sender: Sender, write: StartWrite) -> None:
        try:
            number = self._transport.write(
                sender.peer, write.local_pages, write.remote_pages, write.note
            )
        except BatonError as error:
            self._perform(key, sender, sender.write_failed(error, self._clock()))
        else:
            self._writes[number] = key

    def _send_for(self, key: AttemptKey, sender: Sender, note: bytes) -> None:
        """A note of a push. Where it cannot even leave, the push fails unless it is over."""
        try:
            self._transport.write(sender.peer, (), (), note)
        except BatonError as error:
            self._perform(key, sender, sender.fail(error))

    def _send(self, peer: str, note: bytes) -> None:
        with suppress(BatonError):  # nobody is left to tell, or it will be asked for again
            self._transport.write(peer, (), (), note)

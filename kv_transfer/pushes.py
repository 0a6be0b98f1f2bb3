"""All pushes of one worker: performs the actions of their senders.

A decode worker counts as connected once it has answered an introduction: a cut
network swallows notes without an error. One that stops answering its pushes has
to be connected again.

Fetched pages are pushes too, from decode to prefill, over the connection that
prefill's introduction has made.

Used by the transfer thread alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from baton.core.errors import BatonError, LayoutMismatch, Unavailable
from baton.core.types import AttemptKey
from baton.kv_transfer.pool_digest import PeerDigest
from baton.kv_transfer.pool_layout import describe_mismatch
from baton.kv_transfer.sender import Introduce, PeerSilent, Sender, SenderAction
from baton.kv_transfer.transfer_events import (
    ConnectPeer,
    LendPages,
    PagesWanted,
    PeerConnected,
    PeerDisconnected,
    PushEnded,
    TransferEvent,
)
from baton.kv_transfer.transfer_protocol import (
    TICKET_VERSION,
    SendNote,
    drained_note,
    introduction_note,
    key_of,
    open_ticket,
)
from baton.kv_transfer.transport import PageWrite, Transport
from baton.v1.transfer_pb2 import Fetch, PoolAddress, TransferNote

ANSWER_SECONDS = 5.0
"""How long a decode worker may take to answer an introduction."""
INTRODUCTIONS_PER_ANSWER = 5
REMEMBERED = 4096
"""Fetches whose repeated notes are dropped."""


@dataclass(slots=True)
class _Meeting:
    """A decode worker that has not answered its introduction yet."""

    worker_id: str
    until: float
    introduce_at: float

    @property
    def deadline(self) -> float:
        return min(self.until, self.introduce_at)


class Pushes:
    """The open pushes, their writes, and the decode workers they may go to."""

    def __init__(
        self,
        transport: Transport,
        address: PoolAddress,
        digest: PeerDigest | None,
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
        self._workers: dict[str, str] = {}  # the decode workers' names, by agent
        self._meetings: dict[str, _Meeting] = {}  # by agent
        self._asked: OrderedDict[AttemptKey, None] = OrderedDict()  # the last fetches

    @property
    def open(self) -> bool:
        return bool(self._senders)

    @property
    def expecting(self) -> bool:
        """Whether the transport has something to report soon."""
        return bool(self._meetings) or any(sender.expects for sender in self._senders.values())

    @property
    def deadline(self) -> float:
        """When `tick` has something to do; infinity when never."""
        senders = (sender.deadline for sender in self._senders.values())
        meetings = (meeting.deadline for meeting in self._meetings.values())
        return min((*senders, *meetings), default=math.inf)

    def connect(self, command: ConnectPeer, in_use: Collection[str] = ()) -> bool:
        """Whether notes can be sent there. `in_use` are agents that others still need."""
        worker_id, address = command.worker_id, command.address
        try:
            agent = self._connect(address)
        except BatonError as error:
            self._deliver(PeerConnected(worker_id, address.agent, error))
            return False
        self._replace_agent(worker_id, agent, in_use)
        now = self._clock()
        self._meetings.setdefault(agent, _Meeting(worker_id, now + ANSWER_SECONDS, now))
        return True

    def begin(self, key: AttemptKey, peer: str) -> None:
        digest = partial(self._digest, peer) if self._digest else None
        self._senders[key] = Sender(key, peer, self._address.page_bytes, digest)

    def lend(self, command: LendPages) -> None:
        """Pushes cached pages to the first of the ticket's."""
        self.begin(command.key, command.peer)
        now = self._clock()
        self._senders[command.key].finish(0, command.pages, now, now)
        self.ticket(command.key, command.ticket, pages=len(command.pages))

    def ticket(self, key: AttemptKey, sealed: bytes, pages: int | None = None) -> None:
        """The ticket of a push, which fills all of its pages, or the first `pages`."""
        sender = self._senders.get(key)
        try:
            body = open_ticket(sealed, self._address.layout)
        except BatonError as error:
            if sender is not None:
                self._perform(key, sender, sender.fail(error))
            return
        if sender is not None:
            body.pages[:] = body.pages[:pages]
            self._perform(key, sender, sender.ticket(body, self._clock()))
        else:
            # The push has ended, or never began: the receiver need not wait for it.
            self._send(body.agent, drained_note(key))

    def apply(self, key: AttemptKey, act: Callable[[Sender], list[SenderAction]]) -> None:
        """Gives an open push its next input."""
        if sender := self._senders.get(key):
            self._perform(key, sender, act(sender))

    def cancel_all(self) -> None:
        for key in list(self._senders):
            self.apply(key, Sender.cancel)

    def on_note(self, peer: str, note: TransferNote) -> None:
        """Handles a receiver's note. One of an unknown attempt changes nothing."""
        if note.HasField("greeting"):
            # A late answer connects the worker all the same.
            if meeting := self._meetings.pop(peer, None):
                self._deliver(PeerConnected(meeting.worker_id, peer, None))
            return
        key = key_of(note)
        if note.HasField("fetch"):
            self._ask(key, peer, note.fetch)
            return
        sender = self._senders.get(key)
        if sender is not None and sender.peer == peer:
            self._perform(key, sender, self._input(sender, note))
        elif note.HasField("revoked"):
            # Its push has ended, which the receiver may have missed.
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
        for key in self._keys_to(peer):
            self.apply(key, Sender.peer_lost)
        self._part_from(peer)

    def tick(self) -> None:
        now = self._clock()
        for key, sender in list(self._senders.items()):
            if now >= sender.deadline:
                self._perform(key, sender, sender.tick(now))
        for agent, meeting in list(self._meetings.items()):
            if now >= meeting.until:
                self._part_from(agent)
            elif now >= meeting.introduce_at:
                meeting.introduce_at = now + ANSWER_SECONDS / INTRODUCTIONS_PER_ANSWER
                self._send(agent, introduction_note(self._address))

    def _keys_to(self, peer: str) -> list[AttemptKey]:
        return [key for key, sender in self._senders.items() if sender.peer == peer]

    def _connect(self, address: PoolAddress) -> str:
        if mismatch := describe_mismatch(self._address.layout, address.layout):
            raise LayoutMismatch(f"the pools have different layouts: {mismatch}")
        if address.ticket_version != TICKET_VERSION:
            raise LayoutMismatch(
                f"tickets have version {TICKET_VERSION} here and {address.ticket_version} there"
            )
        return self._transport.connect(address)

    def _replace_agent(self, worker_id: str, agent: str, in_use: Collection[str]) -> None:
        """A restarted worker has a new agent; the old one is disconnected once it is idle."""
        self._workers[agent] = worker_id
        kept = {agent, *in_use, *(sender.peer for sender in self._senders.values())}
        for old in [old for old, name in self._workers.items() if name == worker_id]:
            if old not in kept:
                del self._workers[old]
                self._meetings.pop(old, None)
                self._transport.disconnect(old)

    def _ask(self, key: AttemptKey, peer: str, fetch: Fetch) -> None:
        """Reports a fetch once: its push may have ended before the receiver's last note."""
        if key in self._asked:
            return
        self._asked[key] = None
        if len(self._asked) > REMEMBERED:
            self._asked.popitem(last=False)
        self._deliver(PagesWanted(key, peer, fetch.ticket, tuple(fetch.page_keys)))

    def _part_from(self, peer: str) -> None:
        """Forgets a decode worker, which has to be connected again."""
        met = self._meetings.pop(peer, None) is None
        worker_id = self._workers.pop(peer, None)
        if worker_id is None:
            return
        error = Unavailable(f"{worker_id} does not answer the prefill worker's notes")
        ended = PeerDisconnected(worker_id, peer)
        self._deliver(ended if met else PeerConnected(worker_id, peer, error))

    def _fall_silent(self, peer: str, error: BatonError) -> None:
        """One push has found the peer silent; all pushes to it fail."""
        self._part_from(peer)
        for key in self._keys_to(peer):
            self.apply(key, lambda sender: sender.fail(error))

    def _input(self, sender: Sender, note: TransferNote) -> list[SenderAction]:
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

    def _perform(self, key: AttemptKey, sender: Sender, actions: Sequence[SenderAction]) -> None:
        for action in actions:
            match action:
                case PageWrite():
                    self._start_write(key, sender, action)
                case SendNote():
                    self._send_for(key, sender, action.note)
                case Introduce():
                    self._send(sender.peer, introduction_note(self._address))
                case PeerSilent():
                    self._fall_silent(sender.peer, action.error)
                case event:
                    if isinstance(event, PushEnded):
                        del self._senders[key]
                    self._deliver(event)

    def _start_write(self, key: AttemptKey, sender: Sender, write: PageWrite) -> None:
        try:
            number = self._transport.write(write)
        except BatonError as error:
            self._perform(key, sender, sender.write_failed(error, self._clock()))
        else:
            self._writes[number] = key

    def _send_for(self, key: AttemptKey, sender: Sender, note: bytes) -> None:
        """Sends a note of a push, which fails if the note cannot be sent."""
        try:
            self._transport.write(PageWrite(sender.peer, note=note))
        except BatonError as error:
            self._perform(key, sender, sender.fail(error))

    def _send(self, peer: str, note: bytes) -> None:
        with suppress(BatonError):  # the peer is lost, or will ask again
            self._transport.write(PageWrite(peer, note=note))

"""All pushes of one worker: carries out what their senders decide.

A decode worker counts as connected once it has answered: a network that is cut
swallows what is sent into it without an error. One that does not answer its
pushes any more has to be connected anew.

What prefill fetches from a cache is pushed too, from decode to prefill, over the
connection that prefill's introduction has made.

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
from baton.core.types import AttemptKey, DeviceEvent
from baton.kv_transfer.notes import drained_note, introduction_note, key_of
from baton.kv_transfer.pool_digest import PeerDigest
from baton.kv_transfer.pool_layout import describe_mismatch
from baton.kv_transfer.push_actions import (
    Action,
    Ended,
    Fail,
    Introduce,
    Overdue,
    SendNote,
    Silent,
    StartWrite,
)
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.ticket import TICKET_VERSION, open_ticket
from baton.kv_transfer.transfer_events import (
    PagesWanted,
    PeerConnected,
    PeerDisconnected,
    PushEnded,
    PushFailed,
    PushOverdue,
    TransferEvent,
)
from baton.kv_transfer.transport import Transport
from baton.v1.transfer_pb2 import Fetch, PoolAddress, PoolLayout, TransferNote

ANSWER_SECONDS = 5.0
"""How long a decode worker may take to answer an introduction."""
INTRODUCTIONS_PER_ANSWER = 5
REMEMBERED = 4096
"""Fetches that are not answered again when their note comes twice."""


@dataclass(slots=True)
class _Meeting:
    """A decode worker that was introduced to and has not answered yet."""

    worker_id: str
    until: float
    introduce_at: float

    @property
    def deadline(self) -> float:
        return min(self.until, self.introduce_at)


class Pushes:
    """The open pushes, the writes under way, and the decode workers they may go to."""

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

    def connect(self, worker_id: str, address: PoolAddress, in_use: Collection[str] = ()) -> bool:
        """Whether notes can be sent there. `in_use` are agents that others still talk to."""
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

    def lend(self, key: AttemptKey, peer: str, sealed: bytes, pages: Sequence[int]) -> None:
        """Pushes pages that are there already, to the first of the ticket's."""
        self.begin(key, peer)
        now = self._clock()
        self._senders[key].finish(0, pages, now, now)
        self.ticket(key, sealed, pages=len(pages))

    def ticket(self, key: AttemptKey, sealed: bytes, pages: int | None = None) -> None:
        """Where a push goes: to all pages of the ticket, or to so many of the first."""
        sender = self._senders.get(key)
        try:
            body = open_ticket(sealed, self._layout)
        except BatonError as error:
            if sender is not None:
                self._perform(key, sender, sender.fail(error))
            return
        if sender is not None:
            body.pages[:] = body.pages[:pages]
            self._perform(key, sender, sender.ticket(body, self._clock()))
        else:
            # The push is over, or never was: the receiver need not wait for it.
            self._send(body.agent, drained_note(key))

    def pages(self, key: AttemptKey, pages: Sequence[int], after: DeviceEvent | None) -> None:
        if sender := self._senders.get(key):
            self._perform(key, sender, sender.pages_ready(pages, self._clock(), after))

    def finish(
        self, key: AttemptKey, first_token: int, pages: Sequence[int], finished_at: float
    ) -> None:
        if sender := self._senders.get(key):
            actions = sender.finish(first_token, pages, finished_at, self._clock())
            self._perform(key, sender, actions)

    def cancel(self, key: AttemptKey) -> None:
        if sender := self._senders.get(key):
            self._perform(key, sender, sender.cancel())

    def cancel_all(self) -> None:
        for key in list(self._senders):
            self.cancel(key)

    def noted(self, peer: str, note: TransferNote) -> None:
        """A receiver's note. One of an unknown attempt matches nothing."""
        if note.HasField("greeting"):
            self._meet(peer)
            return
        key = key_of(note)
        if note.HasField("fetch"):
            self._ask(key, peer, note.fetch)
            return
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
                self._introduce(agent)

    @property
    def _layout(self) -> PoolLayout:
        return self._address.layout

    def _connect(self, address: PoolAddress) -> str:
        if mismatch := describe_mismatch(self._layout, address.layout):
            raise LayoutMismatch(f"the pools are laid out differently: {mismatch}")
        if address.ticket_version != TICKET_VERSION:
            raise LayoutMismatch(
                f"tickets have version {TICKET_VERSION} here and {address.ticket_version} there"
            )
        return self._transport.connect(address)

    def _replace_agent(self, worker_id: str, agent: str, in_use: Collection[str]) -> None:
        """A worker that restarted has a new agent; the old one is forgotten once it is idle."""
        self._workers[agent] = worker_id
        kept = {agent, *in_use, *(sender.peer for sender in self._senders.values())}
        for old in [old for old, name in self._workers.items() if name == worker_id]:
            if old not in kept:
                del self._workers[old]
                self._meetings.pop(old, None)
                self._transport.disconnect(old)

    def _ask(self, key: AttemptKey, peer: str, fetch: Fetch) -> None:
        """Only once: a push is over when it has ended, and the receiver may not know it yet."""
        if key in self._asked:
            return
        self._asked[key] = None
        if len(self._asked) > REMEMBERED:
            self._asked.popitem(last=False)
        self._deliver(PagesWanted(key, peer, fetch.ticket, tuple(fetch.page_keys)))

    def _meet(self, peer: str) -> None:
        """It has answered. One that did so late is connected all the same."""
        if meeting := self._meetings.pop(peer, None):
            self._deliver(PeerConnected(meeting.worker_id, peer, None))

    def _part_from(self, peer: str) -> None:
        """To push there again, it has to be connected anew."""
        met = self._meetings.pop(peer, None) is None
        worker_id = self._workers.pop(peer, None)
        if worker_id is None:
            return
        error = Unavailable(f"{worker_id} does not answer the prefill worker's notes")
        ended = PeerDisconnected(worker_id, peer)
        self._deliver(ended if met else PeerConnected(worker_id, peer, error))

    def _fall_silent(self, peer: str, error: BatonError) -> None:
        """What one push has found out holds for all of them."""
        self._part_from(peer)
        for key, sender in list(self._senders.items()):
            if sender.peer == peer:
                self._perform(key, sender, sender.fail(error))

    def _introduce(self, peer: str) -> None:
        self._send(peer, introduction_note(self._address))

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
                case Silent():
                    self._fall_silent(sender.peer, action.error)
                case Fail():
                    self._deliver(PushFailed(key, action.error))
                case Overdue():
                    self._deliver(PushOverdue(key))
                case Ended():
                    del self._senders[key]
                    times = action.seconds, action.exposed_seconds
                    self._deliver(PushEnded(key, action.error, action.bytes, *times))

    def _start_write(self, key: AttemptKey, sender: Sender, write: StartWrite) -> None:
        try:
            number = self._transport.write(
                sender.peer, write.local_pages, write.remote_pages, write.note, write.after
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

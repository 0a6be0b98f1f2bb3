"""All pushes and reservations of one worker: performs the actions of their state machines.

A fetch is a push too, from decode to prefill, over the connection that prefill's
introduction has made.

Used by the transfer thread alone.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from baton.core.errors import BatonError
from baton.core.types import AttemptKey
from baton.kv_transfer.peers import TransferPeers
from baton.kv_transfer.pool_layout import PeerDigest
from baton.kv_transfer.receiver import Receiver, ReceiverAction, ReceiverState
from baton.kv_transfer.sender import Introduce, PeerSilent, Sender, SenderAction
from baton.kv_transfer.transfer_events import (
    Arrived,
    CancelPush,
    ConnectPeer,
    DeliverTicket,
    ExpectPages,
    Fetched,
    FinishPush,
    LendPages,
    OpenPush,
    PagesDamaged,
    PagesWanted,
    PushEnded,
    PushPages,
    ReleaseReservation,
    ReservationFreed,
    SenderDied,
    StartFetch,
    TransferCommand,
    TransferEvent,
)
from baton.kv_transfer.transfer_protocol import (
    SendNote,
    accepted_note,
    drained_note,
    key_of,
    open_ticket,
    pack_note,
    revoked_note,
)
from baton.kv_transfer.transport import PageWrite, Transport
from baton.v1.transfer_pb2 import Arrived as ArrivedNote
from baton.v1.transfer_pb2 import Fetch, PoolAddress, TransferNote

REMEMBERED = 4096
"""How many past fetches and arrived reservations are remembered: a fetch's repeated notes are
dropped, and an arrived reservation's sender gets Accepted again if it asks."""

_log = logging.getLogger(__name__)


class Transfers:
    """The pushes and reservations under way, and their peers."""

    def __init__(
        self,
        transport: Transport,
        address: PoolAddress,
        digest: PeerDigest | None,
        lease_seconds: float,
        linger_seconds: float,
        deliver: Callable[[TransferEvent], None],
        clock: Callable[[], float],
    ) -> None:
        self.peers = TransferPeers(transport, address, deliver, clock)
        self._transport = transport
        self._address = address
        self._digest = digest
        self._lease_seconds = lease_seconds
        self._linger_seconds = linger_seconds
        self._deliver = deliver
        self._clock = clock
        self._senders: dict[AttemptKey, Sender] = {}
        self._receivers: dict[AttemptKey, Receiver] = {}  # that a sender may still write to
        self._writes: dict[int, AttemptKey] = {}  # of the senders
        self._reported_fetches: OrderedDict[AttemptKey, None] = OrderedDict()
        self._arrived: OrderedDict[AttemptKey, None] = OrderedDict()

    @property
    def pushing(self) -> bool:
        return bool(self._senders)

    @property
    def expecting(self) -> bool:
        """True while events of the transport are expected soon."""
        if self.peers.connecting or self._receivers:
            return True
        return any(sender.expects for sender in self._senders.values())

    @property
    def deadline(self) -> float:
        """When `tick` has something to do; infinity when never."""
        return min([self.peers.deadline, *(each.deadline for each in self._machines)])

    @property
    def _machines(self) -> Iterator[Sender | Receiver]:
        return itertools.chain(self._senders.values(), self._receivers.values())

    def carry_out(self, command: TransferCommand, at: float) -> None:
        """Carries out a command that was posted at `at`."""
        match command:
            case ConnectPeer():
                self.peers.connect(command, {each.peer for each in self._machines})
            case OpenPush(key, peer):
                self._open_push(key, peer)
            case DeliverTicket(key, ticket):
                self._deliver_ticket(key, ticket)
            case PushPages(key, pages, after):
                self._push(key, lambda push: push.pages_ready(pages, self._clock(), after))
            case FinishPush(key, token, pages):
                self._push(key, lambda push: push.finish(token, pages, at, self._clock()))
            case CancelPush(key):
                self._push(key, Sender.cancel)
            case LendPages():
                self._lend(command)
            case ExpectPages(key, sender, pages, seconds):
                expires_at, lease = at + seconds, self._lease_seconds
                self._receivers[key] = Receiver(key, sender, pages, expires_at, lease)
            case StartFetch():
                self._fetch(command, at)
            case ReleaseReservation(key):
                self._release(key)
            case SenderDied(agent):
                self._sender_died(agent)

    def cancel_pushes(self) -> None:
        for key in list(self._senders):
            self._push(key, Sender.cancel)

    def on_note(self, peer: str, note: TransferNote) -> None:
        """Handles a peer's note. Notes of unknown attempts change nothing."""
        match note.WhichOneof("kind"):
            case "greeting":
                self.peers.greeted(peer)
            case "fetch":
                self._report_fetch(key_of(note), peer, note.fetch)
            case "beat" | "arrived" | "drained":
                self._on_sender_note(peer, note)
            case _:
                self._on_receiver_note(peer, note)

    def write_ended(self, write: int, error: BatonError | None = None) -> None:
        if key := self._writes.pop(write, None):
            push, now = self._senders[key], self._clock()
            actions = push.write_failed(error, now) if error else push.write_done(now)
            self._perform_sender(push, actions)

    def peer_lost(self, peer: str, *, gone: bool) -> None:
        for push in self._pushes_to(peer):
            self._perform_sender(push, push.peer_lost())
        self.peers.lost(peer, gone=gone)
        for receiver in self._receivers_from(peer) if gone else []:
            self._perform_receiver(receiver, receiver.sender_died())

    def tick(self) -> None:
        now = self._clock()
        for push in list(self._senders.values()):
            if now >= push.deadline:
                self._perform_sender(push, push.tick(now))
        self.peers.tick()
        for receiver in list(self._receivers.values()):
            if now >= receiver.deadline:
                self.peers.reach(receiver.peer)
                self._perform_receiver(receiver, receiver.tick(now))

    # Pushes.

    def _open_push(self, key: AttemptKey, peer: str) -> None:
        digest = partial(self._digest, peer) if self._digest else None
        self._senders[key] = Sender(key, peer, self._address.page_bytes, digest)

    def _lend(self, command: LendPages) -> None:
        """Pushes cached pages into the ticket's first pages."""
        self._open_push(command.key, command.peer)
        now = self._clock()
        self._senders[command.key].finish(0, command.pages, now, now)
        self._deliver_ticket(command.key, command.ticket, pages=len(command.pages))

    def _deliver_ticket(self, key: AttemptKey, sealed: bytes, pages: int | None = None) -> None:
        """Gives a push its ticket. It fills all of the ticket's pages, or the first `pages`."""
        push = self._senders.get(key)
        try:
            body = open_ticket(sealed, self._address.layout)
        except BatonError as error:
            if push is not None:
                self._perform_sender(push, push.fail(error))
            return
        if push is not None:
            body.pages[:] = body.pages[:pages]
            self._perform_sender(push, push.ticket(body, self._clock()))
        else:
            # The push has ended, or never began: the receiver need not wait for it.
            self.peers.send(body.agent, drained_note(key))

    def _push(self, key: AttemptKey, act: Callable[[Sender], list[SenderAction]]) -> None:
        """Gives an open push its next input."""
        if push := self._senders.get(key):
            self._perform_sender(push, act(push))

    def _pushes_to(self, peer: str) -> list[Sender]:
        return [push for push in self._senders.values() if push.peer == peer]

    def _on_receiver_note(self, peer: str, note: TransferNote) -> None:
        push, key = self._senders.get(key_of(note)), key_of(note)
        if push is not None and push.peer == peer:
            self._perform_sender(push, self._sender_input(push, note))
        elif note.HasField("revoked"):
            # The push has ended, and the receiver may have missed it. If a link between other
            # shards is broken, only this side knows: the receiver sends notes over the first link.
            self.peers.reach(peer)
            self.peers.send(peer, drained_note(key))

    def _sender_input(self, push: Sender, note: TransferNote) -> list[SenderAction]:
        match note.WhichOneof("kind"):
            case "renewed":
                return push.renewed(note.renewed.number, self._clock())
            case "revoked":
                return push.revoked()
            case "resend":
                return push.resend(note.resend, self._clock())
            case "accepted":
                return push.accepted()
            case _:
                return []

    def _report_fetch(self, key: AttemptKey, peer: str, fetch: Fetch) -> None:
        """Reports a fetch once: its push may have ended before the receiver's last note."""
        if key not in self._reported_fetches:
            _remember(self._reported_fetches, key)
            self._deliver(PagesWanted(key, peer, fetch.ticket, tuple(fetch.page_keys)))

    def _perform_sender(self, push: Sender, actions: Sequence[SenderAction]) -> None:
        for action in actions:
            match action:
                case PageWrite():
                    self._start_write(push, action)
                case SendNote(note):
                    self._send_for(push, note)
                case Introduce():
                    self.peers.introduce(push.peer)
                case PeerSilent(error):
                    self._peer_silent(push.peer, error)
                case event:
                    if isinstance(event, PushEnded):
                        del self._senders[push.key]
                    self._deliver(event)

    def _start_write(self, push: Sender, write: PageWrite) -> None:
        try:
            self._transport.write(write)
        except BatonError as error:
            self._perform_sender(push, push.write_failed(error, self._clock()))
        else:
            self._writes[write.number] = push.key

    def _send_for(self, push: Sender, note: bytes) -> None:
        """Sends a note of a push, which fails if the note cannot be sent."""
        try:
            self._transport.write(PageWrite(push.peer, note=note))
        except BatonError as error:
            self._perform_sender(push, push.fail(error))

    def _peer_silent(self, peer: str, error: BatonError) -> None:
        """Fails all pushes to a peer once one of them finds it silent."""
        self.peers.drop(peer)
        for push in self._pushes_to(peer):
            self._perform_sender(push, push.fail(error))

    # Reservations.

    def _fetch(self, command: StartFetch, at: float) -> None:
        """Asks the holder to push its cached pages of the keys."""
        key, expires_at = command.key, at + command.seconds
        receiver = self._receivers[key] = Receiver(
            key, command.holder, command.pages, expires_at, self._lease_seconds, fetched_since=at
        )
        fetch = Fetch(ticket=command.ticket, page_keys=command.page_keys)
        note = pack_note(key, TransferNote(fetch=fetch))
        try:
            self._transport.write(PageWrite(command.holder, note=note))
        except BatonError:  # the holder was never asked
            self._perform_receiver(receiver, receiver.sender_died())

    def _release(self, key: AttemptKey) -> None:
        if receiver := self._receivers.get(key):
            self._perform_receiver(receiver, receiver.release(self._clock()))
        else:  # its last event is on its way to the worker
            self._deliver(ReservationFreed(key))

    def _sender_died(self, agent: str) -> None:
        """Handles a router's report that a sender's process has ended. Bytes that it sent may
        arrive until the connection is lost too or `linger_seconds` have passed."""
        until = self._clock() + self._linger_seconds
        for receiver in self._receivers_from(agent):
            self._perform_receiver(receiver, receiver.linger(until))

    def _receivers_from(self, sender: str) -> list[Receiver]:
        return [receiver for receiver in self._receivers.values() if receiver.peer == sender]

    def _on_sender_note(self, peer: str, note: TransferNote) -> None:
        """A beat that cannot be answered is dropped; the sender will introduce itself again."""
        key, kind = key_of(note), note.WhichOneof("kind")
        if kind == "beat" and not self.peers.can_answer(peer):
            return
        receiver = self._receivers.get(key)
        if receiver is not None and receiver.peer == peer:
            self._perform_receiver(receiver, self._receiver_input(receiver, note))
        elif receiver is None and kind != "drained":
            # The sender missed how its reservation ended.
            answer = accepted_note(key) if key in self._arrived else revoked_note(key)
            self.peers.send(peer, answer)

    def _receiver_input(self, receiver: Receiver, note: TransferNote) -> list[ReceiverAction]:
        match note.WhichOneof("kind"):
            case "beat":
                return receiver.beat(note.beat.number, self._clock())
            case "arrived":
                damaged = self._damaged(receiver, note.arrived)
                return receiver.arrived(note.arrived, damaged, self._clock())
            case _:
                return receiver.drained()

    def _damaged(self, receiver: Receiver, note: ArrivedNote) -> list[int]:
        """The positions of pages that arrived damaged."""
        sent, pages = note.digests, receiver.pages[: note.pages]
        if self._digest is None or len(sent) != len(pages):
            return []
        if receiver.state is not ReceiverState.OPEN or note.round != receiver.round:
            return []
        here = self._digest(receiver.peer, pages)
        damaged = [at for at, digest in enumerate(here) if digest != sent[at]]
        if damaged:
            _log.warning("%d pages of %s arrived damaged", len(damaged), receiver.key)
            self._deliver(PagesDamaged(receiver.key, len(damaged)))
        return damaged

    def _perform_receiver(self, receiver: Receiver, actions: Sequence[ReceiverAction]) -> None:
        if receiver.over:
            del self._receivers[receiver.key]
        for action in actions:
            if isinstance(action, SendNote):
                self.peers.send(receiver.peer, action.note)
                continue
            if isinstance(action, Arrived | Fetched):
                _remember(self._arrived, receiver.key)
            self._deliver(action)


def _remember(recent: OrderedDict[AttemptKey, None], key: AttemptKey) -> None:
    recent[key] = None
    if len(recent) > REMEMBERED:
        recent.popitem(last=False)

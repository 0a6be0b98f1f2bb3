"""All reservations of one worker: performs the actions of their receivers.

Used by the transfer thread alone.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.core.types import AttemptKey
from baton.kv_transfer.pool_digest import PeerDigest
from baton.kv_transfer.receiver import Receiver, ReceiverAction, ReceiverState
from baton.kv_transfer.transfer_events import (
    Arrived,
    ExpectPages,
    Fetched,
    PagesDamaged,
    ReservationFreed,
    StartFetch,
    TransferEvent,
)
from baton.kv_transfer.transfer_protocol import (
    SendNote,
    accepted_note,
    fetch_note,
    greeting_note,
    key_of,
    revoked_note,
)
from baton.kv_transfer.transport import PageWrite, Transport
from baton.v1.transfer_pb2 import Arrived as ArrivedNote
from baton.v1.transfer_pb2 import PoolAddress, TransferNote

REMEMBERED = 1024
"""Arrived reservations, whose senders get Accepted again if they ask."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Expected:
    sender: str  # the agent that may write
    pages: tuple[int, ...]
    receiver: Receiver


class Reservations:
    """The reservations that a sender may still write to."""

    def __init__(
        self,
        transport: Transport,
        digest: PeerDigest | None,
        lease_seconds: float,
        linger_seconds: float,
        deliver: Callable[[TransferEvent], None],
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._digest = digest
        self._lease_seconds = lease_seconds
        self._linger_seconds = linger_seconds
        self._deliver = deliver
        self._clock = clock
        self._expected: dict[AttemptKey, _Expected] = {}
        self._arrived: OrderedDict[AttemptKey, None] = OrderedDict()
        self._pools: dict[str, PoolAddress] = {}  # the addresses of senders
        self._reachable: set[str] = set()  # senders whose beats are answered
        self._lingering: dict[AttemptKey, float] = {}  # when an ended sender's may be freed

    @property
    def open(self) -> bool:
        return bool(self._expected)

    @property
    def deadline(self) -> float:
        """When `tick` has something to do; infinity when never."""
        receivers = (each.receiver.deadline for each in self._expected.values())
        return min((*receivers, *self._lingering.values()), default=math.inf)

    @property
    def senders(self) -> set[str]:
        """The agents that may write."""
        return {expected.sender for expected in self._expected.values()}

    def expect(self, command: ExpectPages, now: float) -> None:
        pages, expires_at = tuple(command.pages), now + command.seconds
        receiver = Receiver(command.key, len(pages), expires_at, self._lease_seconds)
        self._expected[command.key] = _Expected(command.sender, pages, receiver)

    def fetch(self, command: StartFetch, now: float) -> None:
        """Asks the holder to push its cached pages of the keys."""
        key, pages = command.key, tuple(command.pages)
        receiver = Receiver(key, len(pages), now + command.seconds, self._lease_seconds, now)
        expected = self._expected[key] = _Expected(command.holder, pages, receiver)
        try:
            note = fetch_note(key, command.ticket, command.page_keys)
            self._transport.write(PageWrite(command.holder, note=note))
        except BatonError:  # the holder was never asked
            self._perform(key, expected, receiver.sender_died())

    def connected(self, pool: PoolAddress) -> None:
        """This worker has connected to a peer that it may fetch from."""
        self._pools[pool.agent] = pool
        self._reachable.add(pool.agent)

    def release(self, key: AttemptKey) -> None:
        expected = self._expected.get(key)
        if expected is None:  # its last event is on its way to the worker
            self._deliver(ReservationFreed(key))
        else:
            self._perform(key, expected, expected.receiver.release(self._clock()))

    def introduced(self, peer: str, pool: PoolAddress) -> None:
        """Connects to a sender, so that its beats can be answered."""
        if pool.agent != peer:
            return
        self._pools[peer] = pool
        try:
            self._transport.connect(pool)
        except BatonError as error:
            _log.warning("cannot answer the prefill worker's agent %s: %s", peer, error)
        else:
            self._reachable.add(peer)
            self._send(peer, greeting_note())

    def sender_died(self, agent: str) -> None:
        """A router reports the end of a sender's process. What it had sent may still arrive, until
        the connection is lost too or `linger_seconds` have passed."""
        until = self._clock() + self._linger_seconds
        for key, expected in self._of(agent):
            if expected.receiver.state is ReceiverState.RESERVED:
                self._perform(key, expected, expected.receiver.sender_died())
            else:
                self._lingering.setdefault(key, until)

    def sender_lost(self, agent: str, *, gone: bool) -> None:
        """An agent cannot be reached any more, until it introduces itself again."""
        self._reachable.discard(agent)
        if gone:
            self._pools.pop(agent, None)
            for key, expected in self._of(agent):
                self._perform(key, expected, expected.receiver.sender_died())

    def on_note(self, peer: str, note: TransferNote) -> None:
        """Handles a sender's note. One of an unknown attempt changes nothing.

        A beat that cannot be answered is dropped; the sender will introduce itself again.
        """
        if note.HasField("beat") and peer not in self._reachable:
            return
        key = key_of(note)
        expected = self._expected.get(key)
        if expected is None:
            self._answer_unknown(peer, key, note)
        elif expected.sender == peer:
            self._perform(key, expected, self._input(key, expected, note))

    def tick(self) -> None:
        now = self._clock()
        for key, expected in list(self._expected.items()):
            if now >= self._lingering.get(key, math.inf):
                self._perform(key, expected, expected.receiver.sender_died())
            elif now >= expected.receiver.deadline:
                self._reach(expected.sender)
                self._perform(key, expected, expected.receiver.tick(now))

    def _of(self, sender: str) -> list[tuple[AttemptKey, _Expected]]:
        return [item for item in self._expected.items() if item[1].sender == sender]

    def _reach(self, agent: str) -> None:
        """Connects to a lost sender that may be alive, to learn how its push ended."""
        if agent in self._pools and agent not in self._reachable:
            with suppress(BatonError):
                self._transport.connect(self._pools[agent])

    def _answer_unknown(self, peer: str, key: AttemptKey, note: TransferNote) -> None:
        """Answers a sender that missed how its reservation ended."""
        if not note.HasField("drained"):
            arrived = key in self._arrived
            self._send(peer, accepted_note(key) if arrived else revoked_note(key))

    def _input(
        self, key: AttemptKey, expected: _Expected, note: TransferNote
    ) -> list[ReceiverAction]:
        match note.WhichOneof("kind"):
            case "beat":
                return expected.receiver.beat(note.beat.number, self._clock())
            case "arrived":
                damaged = self._damaged(key, expected, note.arrived)
                return expected.receiver.arrived(note.arrived, damaged, self._clock())
            case "drained":
                return expected.receiver.drained()
            case _:
                return []

    def _damaged(self, key: AttemptKey, expected: _Expected, note: ArrivedNote) -> list[int]:
        """The positions of pages that arrived damaged."""
        sent, pages = note.digests, expected.pages[: note.pages]
        if self._digest is None or len(sent) != len(pages):
            return []
        if (
            expected.receiver.state is not ReceiverState.OPEN
            or note.round != expected.receiver.round
        ):
            return []
        here = self._digest(expected.sender, pages)
        damaged = [at for at, digest in enumerate(here) if digest != sent[at]]
        if damaged:
            _log.warning("%d pages of %s arrived damaged", len(damaged), key)
            self._deliver(PagesDamaged(key, len(damaged)))
        return damaged

    def _perform(
        self, key: AttemptKey, expected: _Expected, actions: Sequence[ReceiverAction]
    ) -> None:
        if expected.receiver.over:
            del self._expected[key]
            self._lingering.pop(key, None)
        for action in actions:
            if isinstance(action, SendNote):
                self._send(expected.sender, action.note)
                continue
            if isinstance(action, Arrived | Fetched):
                self._remember(key)
            self._deliver(action)

    def _remember(self, key: AttemptKey) -> None:
        self._arrived[key] = None
        if len(self._arrived) > REMEMBERED:
            self._arrived.popitem(last=False)

    def _send(self, peer: str, note: bytes) -> None:
        with suppress(BatonError):  # it is repeated, or requested again
            self._transport.write(PageWrite(peer, note=note))

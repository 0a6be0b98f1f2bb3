"""The peers of one worker: where they are, and whether they answer.

A decode worker counts as connected once it has answered an introduction: a cut
network drops notes without an error. One that stops answering pushes has to be
connected again.

The introduction carries the prefill worker's address, so that notes and fetched
pages can be sent to it.

Used by the transfer thread alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from baton.core.errors import BatonError, LayoutMismatch, Unavailable
from baton.kv_transfer.pool_layout import describe_mismatch
from baton.kv_transfer.transfer_events import (
    ConnectPeer,
    PeerConnected,
    PeerDisconnected,
    TransferEvent,
)
from baton.kv_transfer.transfer_protocol import TICKET_VERSION
from baton.kv_transfer.transport import PageWrite, Transport
from baton.v1.transfer_pb2 import Greeting, Introduction, PoolAddress, TransferNote

ANSWER_SECONDS = 5.0
"""How long a decode worker may take to answer an introduction."""
INTRODUCTIONS_PER_ANSWER = 5

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _PendingPeer:
    """A decode worker that has not answered its introduction yet."""

    worker_id: str
    until: float
    introduce_at: float

    @property
    def deadline(self) -> float:
        return min(self.until, self.introduce_at)


class TransferPeers:
    def __init__(
        self,
        transport: Transport,
        address: PoolAddress,
        deliver: Callable[[TransferEvent], None],
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._address = address
        self._deliver = deliver
        self._clock = clock
        self._workers: dict[str, str] = {}  # the decode workers' names, by agent
        self._pending: dict[str, _PendingPeer] = {}  # by agent
        self._pools: dict[str, PoolAddress] = {}  # of the agents that may send pages
        self._reachable: set[str] = set()  # agents of `_pools` that are connected

    @property
    def connecting(self) -> bool:
        """True while an introduction has no answer yet."""
        return bool(self._pending)

    @property
    def deadline(self) -> float:
        """When `tick` has something to do; infinity when never."""
        return min((each.deadline for each in self._pending.values()), default=math.inf)

    def connect(self, command: ConnectPeer, in_use: Collection[str]) -> None:
        """Connects a decode worker. `in_use` are agents that transfers still need."""
        worker_id, pool = command.worker_id, command.address
        try:
            agent = self._connect(pool)
        except BatonError as error:
            self._deliver(PeerConnected(worker_id, pool.agent, error))
            return
        self._replace_agent(worker_id, agent, in_use)
        self._pools[agent] = pool
        self._reachable.add(agent)
        now = self._clock()
        self._pending.setdefault(agent, _PendingPeer(worker_id, now + ANSWER_SECONDS, now))

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
            self.send(peer, TransferNote(greeting=Greeting()).SerializeToString())

    def greeted(self, peer: str) -> None:
        """A decode worker has answered its introduction."""
        if pending := self._pending.pop(peer, None):
            self._deliver(PeerConnected(pending.worker_id, peer, None))

    def can_answer(self, peer: str) -> bool:
        return peer in self._reachable

    def reach(self, agent: str) -> None:
        """Connects to a lost peer that may be alive, to learn or to report how a push ended."""
        if agent in self._pools and agent not in self._reachable:
            with suppress(BatonError):
                self._transport.connect(self._pools[agent])

    def lost(self, agent: str, *, gone: bool) -> None:
        """An agent cannot be reached any more, until it introduces itself again."""
        self._reachable.discard(agent)
        if gone:
            self._pools.pop(agent, None)
        self.drop(agent)

    def drop(self, agent: str) -> None:
        """Forgets a decode worker, which has to be connected again."""
        connected = self._pending.pop(agent, None) is None
        worker_id = self._workers.pop(agent, None)
        if worker_id is None:
            return
        error = Unavailable(f"{worker_id} does not answer the prefill worker's notes")
        ended = PeerDisconnected(worker_id, agent)
        self._deliver(ended if connected else PeerConnected(worker_id, agent, error))

    def introduce(self, agent: str) -> None:
        """Sends our address."""
        introduction = Introduction(pool=self._address)
        self.send(agent, TransferNote(introduction=introduction).SerializeToString())

    def send(self, agent: str, note: bytes) -> None:
        with suppress(BatonError):  # the peer is lost, or the note will be repeated
            self._transport.write(PageWrite(agent, note=note))

    def tick(self) -> None:
        now = self._clock()
        for agent, pending in list(self._pending.items()):
            if now >= pending.until:
                self.drop(agent)
            elif now >= pending.introduce_at:
                pending.introduce_at = now + ANSWER_SECONDS / INTRODUCTIONS_PER_ANSWER
                self.introduce(agent)

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
        for old in [old for old, name in self._workers.items() if name == worker_id]:
            if old != agent and old not in in_use:
                del self._workers[old]
                self._pending.pop(old, None)
                self._transport.disconnect(old)

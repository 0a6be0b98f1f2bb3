"""A shard of this worker's pool in another process, driven as if it were here.

A process that ends takes its worker with it: what it had sent may still arrive,
so nothing may be said of its writes. `poll` raises then.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Sequence

from baton.core.errors import WorkerLost
from baton.core.types import DeviceEvent
from baton.kv_transfer.shard_channel import Channel, ChannelBroken, error_from, write_part
from baton.kv_transfer.transport import (
    PagePart,
    PeerLost,
    TransportEvent,
    WriteDone,
    WriteFailed,
)
from baton.v1 import shard_pb2 as pb
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout, PoolShard

ANSWER_SECONDS = 60.0
"""How long the other process may take to answer: it may be in the middle of a long write."""

REGISTER_SECONDS = 600.0
"""How long it may take until its pool is there: it may be loading the model."""

CLOSE_SECONDS = 5.0

POLL_SECONDS = 0.001
"""The other process polls when this one does, and not more often than that."""


class ShardProxy:
    """The shard at the other end of `connection`, which runs kv_transfer/shard_host.py."""

    def __init__(self, connection: socket.socket) -> None:
        self._channel = Channel(connection, pb.ShardReport)
        self._numbers = itertools.count(1)
        self._events: list[TransportEvent] = []
        self._broken = ""  # why nothing can be heard from the other process any more
        self._polled_at = 0.0
        self._later: list[tuple[DeviceEvent, pb.ShardCommand]] = []  # writes of pages not yet made

    def register(self, layout: PoolLayout) -> PoolShard:
        """Makes the shard reachable; once, before anything else. Raises why it is not."""
        self._send(pb.ShardCommand(register=pb.ShardRegister(layout=layout)))
        answer = self._wait("registered", REGISTER_SECONDS).registered
        if answer.HasField("error"):
            raise error_from(answer.error)
        return answer.shard

    def connect(self, address: PoolAddress, part: PagePart | None = None) -> str:
        order = pb.ShardConnect(pool=address, part=write_part(part))
        self._send(pb.ShardCommand(connect=order))
        answer = self._wait("connected", ANSWER_SECONDS).connected
        if answer.HasField("error"):
            raise error_from(answer.error)
        return answer.peer

    def disconnect(self, peer: str) -> None:
        self._send(pb.ShardCommand(disconnect=pb.ShardDisconnect(peer=peer)))

    def write(
        self,
        peer: str,
        local_pages: Sequence[int],
        remote_pages: Sequence[int],
        note: bytes = b"",
        after: DeviceEvent | None = None,
    ) -> int:
        """As a transport's; whatever it refuses comes as WriteFailed.

        The other process cannot wait for a moment of this one's device: `poll` does.
        """
        number = next(self._numbers)
        pages = {"local_pages": local_pages, "remote_pages": remote_pages}
        write = pb.ShardWrite(number=number, peer=peer, note=note, **pages)
        command = pb.ShardCommand(write=write)
        if after is None or after.query():
            self._send(command)
        else:
            self._later.append((after, command))
        return number

    def begin_digests(self, pages: Sequence[int], part: PagePart | None) -> None:
        """Has the shard digest its part of these pages; `end_digests` waits for it."""
        order = pb.ShardDigest(pages=pages, part=write_part(part))
        self._send(pb.ShardCommand(digest=order))

    def end_digests(self) -> list[int]:
        """The answer to the `begin_digests` that has waited for the longest."""
        return list(self._wait("digests", ANSWER_SECONDS).digests.digests)

    def poll(self) -> list[TransportEvent]:
        """Raises WorkerLost when the other process is gone."""
        self._send_what_is_ready()
        self._have_polled()
        while not self._broken and (report := self._receive(0.0)):
            self._take(report)
        if self._broken:
            raise WorkerLost(f"a rank of this worker cannot be reached: {self._broken}")
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Ends the other process's transfers, and waits a while for it to let go of its memory.
        Closing twice is fine."""
        self._channel.end()
        deadline = time.monotonic() + CLOSE_SECONDS
        while not self._broken and time.monotonic() < deadline:
            self._receive(deadline - time.monotonic())
        self._broken = self._broken or "it is closed"
        self._channel.close()

    def _send_what_is_ready(self) -> None:
        waiting, self._later = self._later, []
        for after, command in waiting:
            if after.query():
                self._send(command)
            else:
                self._later.append((after, command))

    def _have_polled(self) -> None:
        if time.monotonic() - self._polled_at >= POLL_SECONDS:
            self._polled_at = time.monotonic()
            self._send(pb.ShardCommand(poll=pb.ShardPoll()))

    def _send(self, command: pb.ShardCommand) -> None:
        try:
            self._channel.send(command)
        except ChannelBroken as error:
            self._broken = str(error)

    def _receive(self, seconds: float) -> pb.ShardReport | None:
        try:
            return self._channel.receive(seconds)
        except ChannelBroken as error:
            self._broken = str(error)
            return None

    def _wait(self, kind: str, seconds: float) -> pb.ShardReport:
        """The answer to what was sent last. What else comes meanwhile is kept for `poll`."""
        deadline = time.monotonic() + seconds
        while not self._broken and (left := deadline - time.monotonic()) > 0:
            if report := self._receive(left):
                if report.WhichOneof("kind") == kind:
                    return report
                self._take(report)
        self._broken = self._broken or f"it has not answered for {seconds:g} seconds"
        raise WorkerLost(f"a rank of this worker cannot be reached: {self._broken}")

    def _take(self, report: pb.ShardReport) -> None:
        match report.WhichOneof("kind"):
            case "ended" if report.ended.HasField("error"):
                error = error_from(report.ended.error)
                self._events.append(WriteFailed(report.ended.number, error))
            case "ended":
                self._events.append(WriteDone(report.ended.number))
            case "lost":
                self._events.append(PeerLost(report.lost.peer, report.lost.gone))

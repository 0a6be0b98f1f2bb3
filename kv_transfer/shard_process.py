"""A shard of a worker's pool in another rank: rank 0's end, and the rank's own.

    rank 0                                  rank 1, 2, …
    ShardProxy ──ShardCommand──▶ serve_shard ──▶ the shard's own transport
               ◀──ShardReport───

The rank decides nothing: it drives its transport as rank 0 says. When the rank
ends, `ShardProxy.poll` raises and the worker ends too: what the rank had sent may
still arrive, so nothing can be said of its writes. When rank 0 ends,
`serve_shard` returns.
"""

from __future__ import annotations

import dataclasses
import itertools
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from google.protobuf.message import Message

from baton.core.errors import BatonError, WorkerLost, from_reason
from baton.kv_transfer.pool_digest import PageDigest, choose_digest
from baton.kv_transfer.pool_layout import HeadRange
from baton.kv_transfer.transfer_thread import IDLE_PAUSE_SECONDS, polling_pause
from baton.kv_transfer.transport import (
    PagePart,
    PageWrite,
    PeerLost,
    PoolMemory,
    SlicingTransport,
    TransportEvent,
    WriteDone,
    WriteFailed,
)
from baton.v1 import shard_pb2 as pb
from baton.v1.transfer_pb2 import PoolAddress, PoolLayout, PoolShard

ANSWER_SECONDS = 60.0
"""How long a rank may take to answer: it may be in a long write."""

REGISTER_SECONDS = 600.0
"""How long its pool may take to exist: it may be loading the model."""

CLOSE_SECONDS = 5.0

POLL_SECONDS = 0.001
"""The rank polls when rank 0 does, but not more often than this."""

_CLOSE = b""
"""Asks the rank to close; it closes the socket when it has."""


class _Channel:
    """One end of the socket. Raises OSError or EOFError when the other end has closed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._poller = select.poll()
        self._poller.register(connection.fileno(), select.POLLIN)
        self.close = connection.close

    def send(self, message: Message | bytes) -> None:
        packed = message if isinstance(message, bytes) else message.SerializeToString()
        self._connection.send_bytes(packed)

    def receive(self, seconds: float) -> bytes | None:
        """The next message, if one comes in time."""
        return self._connection.recv_bytes() if self._poller.poll(seconds * 1000) else None


class ShardProxy:
    """Rank 0's end: drives the shard at the other end of `connection` as if it were here."""

    def __init__(self, connection: Connection) -> None:
        self._channel = _Channel(connection)
        self._numbers = itertools.count(1)
        self._events: list[TransportEvent] = []
        self._broken = ""  # why the rank cannot be reached any more
        self._polled_at = 0.0
        self._later: list[tuple[int, PageWrite]] = []  # of pages that are not complete yet

    def register(self, layout: PoolLayout) -> PoolShard:
        """Makes the shard reachable; once, before anything else. Raises why it is not."""
        self._send(pb.ShardCommand(register=pb.ShardRegister(layout=layout)))
        answer = self._wait("registered", REGISTER_SECONDS).registered
        if answer.HasField("error"):
            raise _error_from(answer.error)
        return answer.shard

    def connect(self, address: PoolAddress, part: PagePart | None = None) -> str:
        order = pb.ShardConnect(pool=address, part=_part_to(part))
        self._send(pb.ShardCommand(connect=order))
        answer = self._wait("connected", ANSWER_SECONDS).connected
        if answer.HasField("error"):
            raise _error_from(answer.error)
        return answer.peer

    def disconnect(self, peer: str) -> None:
        self._send(pb.ShardCommand(disconnect=pb.ShardDisconnect(peer=peer)))

    def write(self, write: PageWrite) -> int:
        """As a transport's; refused writes come as WriteFailed.

        The rank cannot wait for an event of rank 0's device: `poll` does.
        """
        number = next(self._numbers)
        if write.ready:
            self._send_write(number, write)
        else:
            self._later.append((number, write))
        return number

    def _send_write(self, number: int, write: PageWrite) -> None:
        order = pb.ShardWrite(
            number=number,
            peer=write.peer,
            local_pages=write.local_pages,
            remote_pages=write.remote_pages,
            note=write.note,
        )
        self._send(pb.ShardCommand(write=order))

    def begin_digests(self, pages: Sequence[int], part: PagePart | None) -> None:
        """Requests digests of the shard's part of these pages; `end_digests` waits for them."""
        order = pb.ShardDigest(pages=pages, part=_part_to(part))
        self._send(pb.ShardCommand(digest=order))

    def end_digests(self) -> list[int]:
        """The answer to the oldest unanswered `begin_digests`."""
        return list(self._wait("digests", ANSWER_SECONDS).digests.digests)

    def poll(self) -> list[TransportEvent]:
        """Raises WorkerLost when the rank is gone."""
        waiting, self._later = self._later, []
        for number, write in waiting:
            if write.ready:
                self._send_write(number, write)
            else:
                self._later.append((number, write))
        if time.monotonic() - self._polled_at >= POLL_SECONDS:
            self._polled_at = time.monotonic()
            self._send(pb.ShardCommand(poll=pb.ShardPoll()))
        while not self._broken and (report := self._receive(0.0)):
            self._handle(report)
        self._check()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Ends the rank's transfers and waits for it to release its memory. May be repeated."""
        self._send(_CLOSE)
        deadline = time.monotonic() + CLOSE_SECONDS
        while not self._broken and time.monotonic() < deadline:
            self._receive(deadline - time.monotonic())
        self._broken = self._broken or "it is closed"
        self._channel.close()

    def _check(self) -> None:
        if self._broken:
            raise WorkerLost(f"a rank of this worker cannot be reached: {self._broken}")

    def _send(self, command: pb.ShardCommand | bytes) -> None:
        try:
            self._channel.send(command)
        except OSError as error:
            self._broken = self._broken or str(error)

    def _receive(self, seconds: float) -> pb.ShardReport | None:
        try:
            packed = self._channel.receive(seconds)
        except (EOFError, OSError) as error:
            self._broken = str(error) or "it has closed its socket"
            return None
        return None if packed is None else pb.ShardReport.FromString(packed)

    def _wait(self, kind: str, seconds: float) -> pb.ShardReport:
        """The answer to the last command. Other reports are kept for `poll`."""
        deadline = time.monotonic() + seconds
        while not self._broken and (left := deadline - time.monotonic()) > 0:
            if report := self._receive(left):
                if report.WhichOneof("kind") == kind:
                    return report
                self._handle(report)
        self._broken = self._broken or f"no answer for {seconds:g} seconds"
        self._check()
        raise AssertionError("unreachable")

    def _handle(self, report: pb.ShardReport) -> None:
        match report.WhichOneof("kind"):
            case "ended" if report.ended.HasField("error"):
                error = _error_from(report.ended.error)
                self._events.append(WriteFailed(report.ended.number, error))
            case "ended":
                self._events.append(WriteDone(report.ended.number))
            case "lost":
                self._events.append(PeerLost(report.lost.peer, report.lost.gone))


def serve_shard(
    connection: Connection,
    transport: SlicingTransport,
    memory: PoolMemory,
    heads: HeadRange,
) -> None:
    """A rank's end: returns when rank 0 has closed or has ended; the transport is then closed."""
    channel = _Channel(connection)
    host = _Host(channel, transport, memory, heads)
    with suppress(EOFError, OSError):
        while host.step():
            pass
    transport.close()
    channel.close()


class _Host:
    def __init__(
        self,
        channel: _Channel,
        transport: SlicingTransport,
        memory: PoolMemory,
        heads: HeadRange,
    ) -> None:
        self._channel = channel
        self._transport = transport
        self._memory = memory
        self._heads = heads
        self._registered = False
        self._digest: PageDigest | None = None  # made when it is first needed
        self._writes: dict[int, int] = {}  # rank 0's numbers, by the transport's
        self._active_at = 0.0
        self._handlers: dict[str, Callable[[pb.ShardCommand], None]] = {
            "register": self._register,
            "connect": self._connect,
            "disconnect": lambda command: transport.disconnect(command.disconnect.peer),
            "write": self._write,
            "digest": self._digest_pages,
            "poll": lambda command: None,  # as after every command
        }

    def step(self) -> bool:
        """Handles a command, if one comes soon, and reports events. False after _CLOSE."""
        packed = self._channel.receive(self._pause())
        if packed == _CLOSE:
            return False
        if packed is not None:
            command = pb.ShardCommand.FromString(packed)
            self._handlers[command.WhichOneof("kind") or ""](command)
        for event in self._transport.poll() if self._registered else []:
            self._report(event)
        return True

    def _pause(self) -> float:
        if not self._writes:
            return IDLE_PAUSE_SECONDS
        return polling_pause(time.monotonic() - self._active_at, self._memory.device)

    def _register(self, command: pb.ShardCommand) -> None:
        answer = pb.ShardRegistered()
        try:
            pool = self._transport.register(self._memory, command.register.layout)
        except BatonError as error:
            answer.error.CopyFrom(_error_to(error))
        else:
            self._registered = True
            pool.ClearField("layout")  # it is in the whole pool's address
            first, count = self._heads
            answer.shard.CopyFrom(PoolShard(first_head=first, heads=count, pool=pool))
        self._channel.send(pb.ShardReport(registered=answer))

    def _connect(self, command: pb.ShardCommand) -> None:
        order = command.connect
        answer = pb.ShardConnected(peer=order.pool.agent)
        try:
            self._transport.connect(order.pool, _part_from(order))
        except BatonError as error:
            answer.error.CopyFrom(_error_to(error))
        self._channel.send(pb.ShardReport(connected=answer))

    def _write(self, command: pb.ShardCommand) -> None:
        order = command.write
        pages = list(order.local_pages), list(order.remote_pages)
        try:
            number = self._transport.write(PageWrite(order.peer, *pages, order.note))
        except BatonError as error:
            self._end(order.number, error)
        else:
            self._active_at = time.monotonic()
            self._writes[number] = order.number

    def _digest_pages(self, command: pb.ShardCommand) -> None:
        if self._digest is None:
            self._digest = choose_digest("on", self._memory)
        assert self._digest is not None
        found = self._digest(list(command.digest.pages), _part_from(command.digest))
        self._channel.send(pb.ShardReport(digests=pb.ShardDigests(digests=found)))

    def _report(self, event: TransportEvent) -> None:
        match event:
            case WriteDone(number):
                self._end(self._writes.pop(number))
            case WriteFailed(number, error):
                self._end(self._writes.pop(number), error)
            case PeerLost(peer, gone):
                lost = pb.ShardPeerLost(peer=peer, gone=gone)
                self._channel.send(pb.ShardReport(lost=lost))

    def _end(self, number: int, error: BatonError | None = None) -> None:
        ended = pb.ShardWriteEnded(number=number, error=_error_to(error) if error else None)
        self._channel.send(pb.ShardReport(ended=ended))


def _error_to(error: BatonError) -> pb.ShardError:
    return pb.ShardError(reason=error.reason, message=error.message)


def _error_from(message: pb.ShardError) -> BatonError:
    return from_reason(message.reason, message.message)


def _part_to(part: PagePart | None) -> pb.PagePart | None:
    return pb.PagePart(**dataclasses.asdict(part)) if part else None


def _part_from(order: pb.ShardConnect | pb.ShardDigest) -> PagePart | None:
    if not order.HasField("part"):
        return None
    part = order.part
    return PagePart(part.rows, part.row_bytes, part.local_offset, part.remote_offset)

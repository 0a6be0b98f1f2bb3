"""The end of a worker's transfers in a process that holds some of its heads.

It serves the process's pool with a transport of its own, and does with it what
the worker's first process says (kv_transfer/shard_proxy.py). It decides nothing.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from baton.core.errors import BatonError
from baton.kv_transfer.pool_digest import PageDigest, choose_digest
from baton.kv_transfer.pool_layout import HeadRange
from baton.kv_transfer.shard_channel import Channel, ChannelBroken, error_to, read_part
from baton.kv_transfer.transfer_thread import IDLE_PAUSE_SECONDS, polling_pause
from baton.kv_transfer.transport import (
    PeerLost,
    PoolMemory,
    SlicingTransport,
    TransportEvent,
    WriteDone,
    WriteFailed,
)
from baton.v1 import shard_pb2 as pb
from baton.v1.transfer_pb2 import PoolShard


def serve_shard(
    connection: socket.socket,
    transport: SlicingTransport,
    memory: PoolMemory,
    heads: HeadRange,
) -> None:
    """Returns when the first process has closed its end of `connection`, or has ended; then
    the transport is closed."""
    channel = Channel(connection, pb.ShardCommand)
    host = _Host(channel, transport, memory, heads)
    try:
        while True:
            host.step()
    except ChannelBroken:
        transport.close()
        channel.close()


class _Host:
    def __init__(
        self,
        channel: Channel[pb.ShardCommand],
        transport: SlicingTransport,
        memory: PoolMemory,
        heads: HeadRange,
    ) -> None:
        self._channel = channel
        self._transport = transport
        self._memory = memory
        self._heads = heads
        self._registered = False
        self._digest: PageDigest | None = None  # made when it is first asked for
        self._writes: dict[int, int] = {}  # the first process's numbers, by the transport's
        self._active_at = 0.0
        self._perform: dict[str, Callable[[pb.ShardCommand], None]] = {
            "register": self._register,
            "connect": self._connect,
            "disconnect": lambda command: transport.disconnect(command.disconnect.peer),
            "write": self._write,
            "digest": self._digest_pages,
            "poll": lambda command: None,  # it is done after every command
        }

    def step(self) -> None:
        """Waits a little for a command, carries it out, and tells what has happened."""
        if command := self._channel.receive(self._pause()):
            self._perform[command.WhichOneof("kind") or ""](command)
        for event in self._transport.poll() if self._registered else []:
            self._tell(event)

    def _pause(self) -> float:
        if not self._writes:
            return IDLE_PAUSE_SECONDS
        return polling_pause(time.monotonic() - self._active_at, self._memory.device)

    def _register(self, command: pb.ShardCommand) -> None:
        answer = pb.ShardRegistered()
        try:
            pool = self._transport.register(self._memory, command.register.layout)
        except BatonError as error:
            answer.error.CopyFrom(error_to(error))
        else:
            self._registered = True
            pool.ClearField("layout")  # the whole pool's address has it
            first, count = self._heads
            answer.shard.CopyFrom(PoolShard(first_head=first, heads=count, pool=pool))
        self._channel.send(pb.ShardReport(registered=answer))

    def _connect(self, command: pb.ShardCommand) -> None:
        order = command.connect
        part = read_part(order.part) if order.HasField("part") else None
        answer = pb.ShardConnected(peer=order.pool.agent)
        try:
            self._transport.connect(order.pool, part)
        except BatonError as error:
            answer.error.CopyFrom(error_to(error))
        self._channel.send(pb.ShardReport(connected=answer))

    def _write(self, command: pb.ShardCommand) -> None:
        order = command.write
        pages = list(order.local_pages), list(order.remote_pages)
        try:
            number = self._transport.write(order.peer, *pages, order.note)
        except BatonError as error:
            self._end(order.number, error)
        else:
            self._active_at = time.monotonic()
            self._writes[number] = order.number

    def _digest_pages(self, command: pb.ShardCommand) -> None:
        if self._digest is None:
            self._digest = choose_digest("on", self._memory)
        assert self._digest is not None
        order = command.digest
        part = read_part(order.part) if order.HasField("part") else None
        digests = pb.ShardDigests(digests=self._digest(list(order.pages), part))
        self._channel.send(pb.ShardReport(digests=digests))

    def _tell(self, event: TransportEvent) -> None:
        match event:
            case WriteDone(number):
                self._end(self._writes.pop(number))
            case WriteFailed(number, error):
                self._end(self._writes.pop(number), error)
            case PeerLost(peer, gone):
                lost = pb.ShardPeerLost(peer=peer, gone=gone)
                self._channel.send(pb.ShardReport(lost=lost))

    def _end(self, number: int, error: BatonError | None = None) -> None:
        ended = pb.ShardWriteEnded(number=number, error=error_to(error) if error else None)
        self._channel.send(pb.ShardReport(ended=ended))

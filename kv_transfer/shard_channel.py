"""Messages between the first process of a worker and those that hold its other heads.

A connected stream socket; each message follows its length. Two of these ends
make a channel, which is over for good when either process ends.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

from google.protobuf.message import Message

from baton.core.errors import BatonError, from_reason
from baton.kv_transfer.transport import PagePart
from baton.v1 import shard_pb2 as pb

_LENGTH = struct.Struct(">I")
_PIECE_BYTES = 1 << 16

Incoming = TypeVar("Incoming", bound=Message)


class ChannelBroken(Exception):
    """The process at the other end has ended, or has closed its end."""


class Channel(Generic[Incoming]):
    """One end. Reads messages of one type; sends any."""

    def __init__(self, connection: socket.socket, incoming: type[Incoming]) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)
        self._incoming = incoming
        self._bytes = bytearray()
        self._messages: deque[Incoming] = deque()

    def send(self, message: Message) -> None:
        """Raises ChannelBroken when nobody will read it."""
        packed = message.SerializeToString()
        try:
            self._connection.sendall(_LENGTH.pack(len(packed)) + packed)
        except OSError as error:
            raise ChannelBroken(str(error)) from error

    def receive(self, seconds: float = 0.0) -> Incoming | None:
        """The next message, if one comes in time. Raises ChannelBroken after the last."""
        while not self._messages:
            if not self._poller.poll(seconds * 1000):
                return None
            self._read()
        return self._messages.popleft()

    def end(self) -> None:
        """Sends nothing any more, which the other end hears after all that was sent."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._connection.close()

    def _read(self) -> None:
        try:
            piece = self._connection.recv(_PIECE_BYTES)
        except OSError as error:
            raise ChannelBroken(str(error)) from error
        if not piece:
            raise ChannelBroken("the other end is closed")
        self._bytes += piece
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            self._messages.append(self._incoming.FromString(bytes(self._bytes[_LENGTH.size : end])))
            del self._bytes[:end]


def error_to(error: BatonError) -> pb.ShardError:
    return pb.ShardError(reason=error.reason, message=error.message)


def error_from(message: pb.ShardError) -> BatonError:
    return from_reason(message.reason, message.message)


def write_part(part: PagePart | None) -> pb.PagePart | None:
    if part is None:
        return None
    return pb.PagePart(
        rows=part.rows,
        row_bytes=part.row_bytes,
        local_offset=part.local_offset,
        remote_offset=part.remote_offset,
    )


def read_part(part: pb.PagePart) -> PagePart:
    return PagePart(part.rows, part.row_bytes, part.local_offset, part.remote_offset)

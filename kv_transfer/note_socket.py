"""Notes between processes of one host, and detection of lost peers.

Every agent listens on a Unix socket in the abstract namespace, under a random
name, and accepts connections of its own user only. A connection carries notes one
way; a long note takes several packets. The kernel closes it when either process
ends: a lost peer is detected by this.

Nothing here blocks. Used by one thread.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from baton.core.errors import WorkerLost
from baton.kv_transfer.transport import Noted
from baton.v1.transfer_pb2 import LocalNote

PIECE_BYTES = 1 << 15
"""The most bytes of a note in one packet; well below a socket's default buffer."""

_PACKET_BYTES = 2 * PIECE_BYTES
_CREDENTIALS = struct.Struct("3i")  # pid, user, group
_BACKLOG = 128


@dataclass(slots=True)
class _Peer:
    """An agent that we send notes to."""

    connection: socket.socket
    waiting: deque[bytes] = field(default_factory=deque)  # packets that did not fit yet


@dataclass(slots=True)
class _Sender:
    """An agent that sends notes to us."""

    connection: socket.socket
    partial: bytearray = field(default_factory=bytearray)  # a note whose last packet has not come


class NoteSocket:
    """One agent's listening socket, and its connections to the agents it sends notes to."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self.name = f"baton-{secrets.token_hex(16)}"
        self._senders: dict[int, _Sender] = {}  # by file descriptor
        self._peers: dict[str, _Peer] = {}  # by agent
        self._listener = _new_socket()
        self._listener.bind(_address(self.name))
        self._listener.listen(_BACKLOG)
        self._poller = select.epoll()
        self._poller.register(self._listener, select.EPOLLIN)

    def connect(self, peer: str, name: str) -> None:
        """Connects to the agent that listens as `name`. Raises WorkerLost when none does."""
        connection = _new_socket()
        try:
            connection.connect(_address(name))
            _check_user(connection)
        except OSError as error:
            connection.close()
            raise WorkerLost(f"{peer} cannot be reached on this host: {error.strerror}") from error
        # The peer sends nothing here: a connection is ready only when it has ended.
        self._poller.register(connection, select.EPOLLRDHUP)
        self._peers[peer] = _Peer(connection)

    def disconnect(self, peer: str) -> None:
        """Closes the connection to a peer, if there is one."""
        known = self._peers.pop(peer, None)
        if known is not None:
            self._drop(known.connection)

    def alive(self, peer: str) -> bool:
        """True if a connected peer is alive now."""
        try:
            ended = not self._peers[peer].connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return not ended

    def send(self, peer: str, note: bytes) -> bool:
        """Sends a note. False if the peer's buffer is full: try again.

        Raises WorkerLost when the peer has ended.
        """
        known = self._peers[peer]
        if not self._flush(peer, known):
            return False
        known.waiting.extend(_packets(self._agent, note))
        self._flush(peer, known)
        return True

    def poll(self) -> tuple[list[Noted], list[str]]:
        """The received notes, and the connected peers that are gone."""
        notes: list[Noted] = []
        ended: set[int] = set()
        for descriptor, _ in self._poller.poll(0):
            if descriptor == self._listener.fileno():
                notes += self._accept()
            elif sender := self._senders.get(descriptor):
                notes += self._read(sender)
            else:
                ended.add(descriptor)
        for peer, known in self._peers.items():
            with suppress(WorkerLost):  # the poller reports it
                self._flush(peer, known)
        gone = [peer for peer, known in self._peers.items() if known.connection.fileno() in ended]
        return notes, gone

    def close(self) -> None:
        """Ends every connection, which the peers notice. May be repeated."""
        senders = [sender.connection for sender in self._senders.values()]
        peers = [peer.connection for peer in self._peers.values()]
        for connection in (*senders, *peers, self._listener):
            connection.close()
        self._senders.clear()
        self._peers.clear()
        self._poller.close()

    def _flush(self, peer: str, known: _Peer) -> bool:
        """Sends waiting packets. True if all are sent. Raises WorkerLost if the peer has ended."""
        try:
            while known.waiting:
                known.connection.send(known.waiting[0])
                known.waiting.popleft()
        except BlockingIOError:
            return False
        except OSError as error:
            raise WorkerLost(f"{peer} has gone: {error.strerror}") from error
        return True

    def _accept(self) -> list[Noted]:
        """Accepts all pending connections, and returns the notes received on them."""
        notes: list[Noted] = []
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                notes += self._welcome(connection)
        return notes

    def _welcome(self, connection: socket.socket) -> list[Noted]:
        connection.setblocking(False)
        try:
            _check_user(connection)
        except PermissionError:
            connection.close()
            return []
        sender = self._senders[connection.fileno()] = _Sender(connection)
        self._poller.register(connection, select.EPOLLIN)
        return self._read(sender)

    def _read(self, sender: _Sender) -> list[Noted]:
        """All notes that a sender has sent. Forgets a sender that has ended."""
        notes: list[Noted] = []
        with suppress(BlockingIOError):
            while packet := _receive(sender.connection):
                notes += _assemble(sender, packet)
            del self._senders[sender.connection.fileno()]
            self._drop(sender.connection)
        return notes

    def _drop(self, connection: socket.socket) -> None:
        self._poller.unregister(connection)
        connection.close()


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


def _address(name: str) -> bytes:
    return b"\0" + name.encode()


def _check_user(connection: socket.socket) -> None:
    """Raises PermissionError when another user is at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    if user != os.geteuid():
        raise PermissionError(1, "the peer belongs to another user")


def _packets(agent: str, note: bytes) -> list[bytes]:
    """A note in pieces that each fit into a packet."""
    starts = range(0, len(note), PIECE_BYTES)
    return [
        LocalNote(
            sender=agent,
            note=note[start : start + PIECE_BYTES],
            more=start + PIECE_BYTES < len(note),
        ).SerializeToString()
        for start in starts
    ]


def _receive(connection: socket.socket) -> bytes:
    """The next packet; empty when the sender has ended."""
    try:
        return connection.recv(_PACKET_BYTES)
    except ConnectionError:
        return b""


def _assemble(sender: _Sender, packet: bytes) -> list[Noted]:
    """The note that `packet` completes, if any."""
    try:
        piece = LocalNote.FromString(packet)
    except DecodeError:  # not one of ours
        return []
    sender.partial += piece.note
    if piece.more:
        return []
    note, sender.partial = bytes(sender.partial), bytearray()
    return [Noted(piece.sender, note)]

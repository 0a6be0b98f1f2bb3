"""A minimal gRPC client over HTTP/2 that reads many answers with almost no work.

Flow-control windows never close, sent headers are not compressed, and received ones are not
parsed. The caller owns the socket and reads from it.
"""

from __future__ import annotations

import socket
import struct
from collections import defaultdict

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Kinds of frames.
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
# Flags; ACK applies to settings and pings.
ACK, END_STREAM, END_HEADERS = 1, 1, 4
INITIAL_WINDOW = 4  # a setting
WIDEST_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 2**16 - 1

FRAME_HEAD = 9
MESSAGE_HEAD = 5


class GrpcConnection:
    def __init__(self, connection: socket.socket, method: str) -> None:
        self._connection = connection
        self._headers = _header_block(method)
        self._names: dict[int, int] = {}  # by HTTP/2 stream id
        self._next = 1
        self._rest = b""
        self._content: defaultdict[int, bytes] = defaultdict(bytes)
        settings = struct.pack(">HI", INITIAL_WINDOW, WIDEST_WINDOW)
        window = struct.pack(">I", WIDEST_WINDOW - DEFAULT_WINDOW)
        connection.sendall(
            PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(WINDOW_UPDATE, 0, 0, window)
        )

    @property
    def open_calls(self) -> int:
        return len(self._names)

    def call(self, name: int, message: bytes) -> None:
        """Begins a call; its answers carry `name`."""
        number, self._next = self._next, self._next + 2
        self._names[number] = name
        content = struct.pack(">BI", 0, len(message)) + message
        self._connection.sendall(
            _frame(HEADERS, END_HEADERS, number, self._headers)
            + _frame(DATA, END_STREAM, number, content)
        )

    def take(self, data: bytes) -> list[tuple[int, bytes]]:
        """Takes received bytes. Returns the messages that they complete, with calls' names."""
        messages: list[tuple[int, bytes]] = []
        data, at = self._rest + data, 0
        while (begin := at + FRAME_HEAD) <= len(data):
            end = begin + int.from_bytes(data[at : at + 3], "big")
            if end > len(data):
                break
            kind, flags, number = struct.unpack_from(">BBI", data, at + 3)
            messages += self._frame(kind, flags, number, data[begin:end])
            at = end
        self._rest = data[at:]
        return messages

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> list[tuple[int, bytes]]:
        messages = []
        if kind == DATA:
            messages = [(self._names[number], each) for each in self._messages(number, payload)]
        elif kind in (SETTINGS, PING) and not flags & ACK:
            answer = payload if kind == PING else b""
            self._connection.sendall(_frame(kind, ACK, 0, answer))
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            self._names.pop(number)
        return messages

    def _messages(self, number: int, payload: bytes) -> list[bytes]:
        content, messages = self._content[number] + payload, []
        while len(content) >= MESSAGE_HEAD:
            end = MESSAGE_HEAD + int.from_bytes(content[1:MESSAGE_HEAD], "big")
            if end > len(content):
                break
            messages.append(content[MESSAGE_HEAD:end])
            content = content[end:]
        self._content[number] = content
        return messages


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, number) + payload


def _header_block(method: str) -> bytes:
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "bench",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())


def _text(text: str) -> bytes:
    """Encodes a text of less than 127 bytes."""
    return bytes([len(text)]) + text.encode()

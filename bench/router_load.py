"""Clients that read many concurrent answers, over gRPC or as server-sent events.

They run in their own process and do as little as possible. Arrival times are the kernel's, so they
do not depend on when a client reads.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import selectors
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Protocol

from baton.v1 import inference_pb2 as pb
from bench.raw_grpc import GrpcConnection

CONNECTIONS = 8
"""Connections that gRPC's streams share; each stream of server-sent events has its own."""

SILENT_SECONDS = 20.0
SO_TIMESTAMPNS = 35
METHOD = "/baton.v1.Inference/Generate"
_TEXTS = re.compile(rb'"text":"([^"]*)"')


@dataclass(slots=True)
class Arrivals:
    """Arrival times of a stream's tokens, on time.monotonic()'s clock, and its message count."""

    times: list[float] = field(default_factory=list)
    messages: int = 0

    def note(self, tokens: int, at: float) -> None:
        if tokens:
            self.times += [at] * tokens
            self.messages += 1


@dataclass(frozen=True, slots=True)
class Reading:
    """The clients' task: read one answer of `tokens` tokens for each stream."""

    edge: str
    address: str
    streams: Sequence[int]
    tokens: int


class Clients:
    """The clients' process. Call `begin`, then `wait_begun`, then `finish`."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()

    def begin(self, reading: Reading) -> None:
        self._pipe.send(reading)

    def wait_begun(self) -> None:
        """Returns when every stream has its first token."""
        self._pipe.recv()

    def finish(self) -> dict[int, Arrivals]:
        """Arrivals by stream, once all have ended."""
        arrivals: dict[int, Arrivals] = self._pipe.recv()
        return arrivals

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Connection) -> None:
    while reading := pipe.recv():
        pipe.send(_read(reading, pipe))


class Source(Protocol):
    """A connection with some streams."""

    @property
    def open_streams(self) -> int: ...

    def take(self, data: bytes) -> list[tuple[int, int]]:
        """Takes received bytes. Returns one (stream, tokens) per completed message."""
        ...


def _read(reading: Reading, pipe: Connection) -> dict[int, Arrivals]:
    """Reads until all streams have ended, or nothing has come for a while."""
    arrivals: defaultdict[int, Arrivals] = defaultdict(Arrivals)
    begun = False
    with selectors.DefaultSelector() as selector:
        for connection, source in _connect(reading):
            selector.register(connection, selectors.EVENT_READ, (connection, source))
        while selector.get_map() and (ready := selector.select(SILENT_SECONDS)):
            for key, _ in ready:
                connection, source = key.data
                if not _receive(connection, source, arrivals):
                    selector.unregister(connection)
                    connection.close()
            if not begun and len(arrivals) == len(reading.streams):
                begun = True
                pipe.send(True)
    if not begun:
        pipe.send(False)
    return arrivals


def _receive(
    connection: socket.socket, source: Source, arrivals: defaultdict[int, Arrivals]
) -> bool:
    """Reads from a connection. False if nothing more will come."""
    data, ancillary, _, _ = connection.recvmsg(2**18, 64)
    if not data:
        return False
    at = time.monotonic() - _age(ancillary)
    for stream, tokens in source.take(data):
        arrivals[stream].note(tokens, at)
    return source.open_streams > 0


def _age(ancillary: Sequence[tuple[int, int, bytes]]) -> float:
    """How long ago the kernel received the data; 0 before it starts to take timestamps."""
    if not ancillary:
        return 0.0
    seconds, nanoseconds = struct.unpack("qq", ancillary[0][2])
    had_at: float = seconds + nanoseconds * 1e-9
    return time.time() - had_at


def _connect(reading: Reading) -> list[tuple[socket.socket, Source]]:
    """Opens connections and sends every request."""
    host, _, port = reading.address.rpartition(":")
    connect = _connect_grpc if reading.edge == "gRPC" else _connect_http
    return connect((host, int(port)), reading)


def _open(address: tuple[str, int]) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    connection.connect(address)
    return connection


def _connect_grpc(address: tuple[str, int], reading: Reading) -> list[tuple[socket.socket, Source]]:
    sources: list[tuple[socket.socket, Source]] = []
    for place in range(min(CONNECTIONS, len(reading.streams))):
        connection = _open(address)
        calls = GrpcConnection(connection, METHOD)
        for stream in reading.streams[place::CONNECTIONS]:
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[stream] * 16),
                max_tokens=reading.tokens,
                ignore_eos=True,
            )
            calls.call(stream, request.SerializeToString())
        sources.append((connection, _Calls(calls)))
    return sources


@dataclass(frozen=True, slots=True)
class _Calls:
    connection: GrpcConnection

    @property
    def open_streams(self) -> int:
        return self.connection.open_calls

    def take(self, data: bytes) -> list[tuple[int, int]]:
        messages = self.connection.take(data)
        return [
            (stream, len(pb.GenerateResponse.FromString(content).delta.token_ids))
            for stream, content in messages
        ]


def _connect_http(address: tuple[str, int], reading: Reading) -> list[tuple[socket.socket, Source]]:
    sources: list[tuple[socket.socket, Source]] = []
    for stream in reading.streams:
        connection = _open(address)
        connection.sendall(_http_request(stream, reading.tokens))
        sources.append((connection, _Events(stream)))
    return sources


@dataclass(slots=True)
class _Events:
    """A stream of events; each letter is a token."""

    stream: int
    open_streams: int = 1
    rest: bytes = b""

    def take(self, data: bytes) -> list[tuple[int, int]]:
        """A partial event waits for the rest."""
        whole, cut, self.rest = (self.rest + data).rpartition(b"\n\n")
        if (cut and whole.endswith(b"[DONE]")) or whole.startswith(b"HTTP/1.1 4"):
            self.open_streams = 0
        return [(self.stream, len(text)) for text in _TEXTS.findall(whole)]


def _http_request(stream: int, tokens: int) -> bytes:
    body = json.dumps(
        {"prompt": [stream] * 16, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    )
    head = [
        "POST /v1/completions HTTP/1.1",
        "host: bench",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    return "\r\n".join([*head, "", body]).encode()

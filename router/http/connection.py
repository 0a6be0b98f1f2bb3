"""One HTTP connection, with bounds on what a client may do without asking for anything."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""From a connection's beginning, or the first byte after an answer, to the next request's head.
An idle connection is closed sooner, by uvicorn."""

MAX_CONNECTIONS = 4096
MAX_HEAD_BYTES = 64 * 2**10


class ChunkingConnection(h11.Connection):
    """Writes the chunks of a body by itself: they change no state, and there is one a token."""

    _chunked = False  # a chunked body is under way

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if self._chunked and type(event) is h11.Data:
            # An empty chunk would be the end.
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        self._chunked = False
        sent = super().send(event)
        if sent and type(event) is h11.Response:
            self._chunked = b"\r\ntransfer-encoding: chunked\r\n" in sent.lower()
        return sent


class BoundedConnection(H11Protocol):
    """uvicorn's protocol, which waits for ever for the rest of a head."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = ChunkingConnection(h11.SERVER, MAX_HEAD_BYTES)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """What comes meanwhile does not set the time back."""
        waiting = self.cycle is None or self.cycle.response_complete
        if not waiting:
            self._forget()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _forget(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

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


CONNECTION = "connection"
"""What a call finds its connection by, in its scope's state."""


class ChunkingConnection(h11.Connection):
    """Writes the chunks of a body by itself: they change no state, and there is one a token."""

    _chunked = False  # a chunked body is under way

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if self._chunked and type(event) is h11.Data:
            return self.more(event.data)
        self._chunked = False
        sent = super().send(event)
        if sent and type(event) is h11.Response:
            self._chunked = b"\r\ntransfer-encoding: chunked\r\n" in sent.lower()
        return sent

    def more(self, body: bytes) -> bytes:
        """What is sent for more of a body."""
        if not self._chunked:
            return super().send(h11.Data(data=body)) or b""
        # An empty chunk would be the end.
        return b"%x\r\n%b\r\n" % (len(body), body) if body else b""


class BoundedConnection(H11Protocol):
    """uvicorn's protocol, which waits for ever for the rest of a head."""

    conn: ChunkingConnection
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = ChunkingConnection(h11.SERVER, MAX_HEAD_BYTES)
        if transport.get_extra_info("sslcontext") is None:
            # What the kernel takes is written at once, and not when the loop comes round. Under
            # TLS, where records are made first, writing would pause and not go on.
            transport.set_write_buffer_limits(high=0)
        self.app_state = {**self.app_state, CONNECTION: self}
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    @property
    def keeps_up(self) -> bool:
        """Whether the client is there and has taken all that was written."""
        return not (self.flow.write_paused or self.cycle.disconnected)

    def write_now(self, content: bytes) -> None:
        """More of the body that is being sent to a client which keeps up."""
        self.transport.write(self.conn.more(content))

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

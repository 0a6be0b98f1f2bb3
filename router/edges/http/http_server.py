"""Uvicorn on the router's event loop, with limits for clients that send no request, and JSON errors
for invalid HTTP.

start()  listens
stop()   takes no more calls, ends calls in progress and closes
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import socket
import ssl
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from baton.core.config import TlsConfig
from baton.core.errors import Internal
from baton.core.tls import CLIENTS_CA, NODE, certificate_path, key_path
from baton.router.edges.http.http_errors import error_response

HEAD_SECONDS = 10.0
"""Time limit from a connection's start, or the first byte after an answer, to the end of the next
request's head; and from an answer that came early to the end of its request's body."""

KEEP_ALIVE_SECONDS = 620
"""Time limit of an idle connection. Longer than those of clients and proxies, so that these close
first: a request that is sent while the router closes gets no answer. httpx and the OpenAI SDK keep
a connection for 5 s, nginx and AWS's load balancers for 60 s, Go for 90 s, Google's load balancers
for 600 s."""

READ_SECONDS = 2.0
"""Time for a client to read the rest of its answer before its idle connection may be cut."""

MAX_CONNECTIONS = 4096
"""One more takes the place of the connection that has been idle for longest, or is closed."""

MAX_HEAD_BYTES = 16 * 2**10
TOO_LONG = f"the request head must have at most {MAX_HEAD_BYTES} bytes"

SEND_BYTES = 128 * 2**10
"""Kernel send buffer of one client. Further tokens wait in its ClientBuffer, which counts them."""

_ABSOLUTE = re.compile(rb"(?i:https?)://[^/?#]+(/[^?#]*)?((?:\?[^#]*)?)")
"""A request's target in absolute form: its path and its query (RFC 9112, 3.2.2)."""

CONNECTION = "connection"
"""Key of a call's BoundedConnection in its scope's state."""


class ChunkingConnection(h11.Connection):
    """Frames body chunks itself, without h11's state machine, since there is one per token.

    Refuses heads that h11 accepts: long ones that arrive at once, versions other than HTTP/1, and
    bodies of two lengths.
    Reduces targets in absolute form, which proxies send, to path and query.
    """

    refusal: h11.RemoteProtocolError | None = None
    _chunked = False  # a chunked body is being sent

    @property
    def is_between_requests(self) -> bool:
        """True until the first byte of the next request."""
        return self.their_state is h11.IDLE and not self.trailing_data[0]

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            if type(event) is h11.Request:
                _check_head(event)
                event = _in_origin_form(event)
        except h11.RemoteProtocolError as error:
            self.refusal = error
            raise
        return event

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if self._chunked and type(event) is h11.Data:
            return self.frame(event.data)
        self._chunked = False
        sent = super().send(event)
        if sent and type(event) is h11.Response:
            self._chunked = b"\r\ntransfer-encoding: chunked\r\n" in sent.lower()
        return sent

    def frame(self, body: bytes) -> bytes:
        """Encodes the next part of a body."""
        if not self._chunked:
            return super().send(h11.Data(data=body)) or b""
        # An empty chunk would end the body.
        return b"%x\r\n%b\r\n" % (len(body), body) if body else b""


class HttpConnections(ServerState):
    """All connections of a server, of which `limit` may be open."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        # Since when, in the loop's time; the one that has been idle for longest is first.
        self.idle: dict[BoundedConnection, float] = {}

    def make_room(self) -> bool:
        """Cuts the connection that has been idle for longest, unless its client may still read."""
        oldest = next(iter(self.idle), None)
        if oldest is None or not oldest.may_be_cut:
            return False
        del self.idle[oldest]
        oldest.transport.abort()  # under TLS, close would wait for the client
        return True


class BoundedConnection(H11Protocol):
    """Uvicorn's protocol with a time limit for request heads, and writes without a task."""

    conn: ChunkingConnection
    server_state: HttpConnections
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = ChunkingConnection(h11.SERVER, MAX_HEAD_BYTES)
        if transport.get_extra_info("sslcontext") is None:
            # Makes writes reach the kernel at once, not in the loop's next turn. Not under TLS,
            # where writing would pause and never resume.
            transport.set_write_buffer_limits(high=0)
        self.app_state = {**self.app_state, CONNECTION: self}
        if len(self.connections) > self.server_state.limit and not self.server_state.make_room():
            transport.abort()
        self._update_timers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_timers()

    def shutdown(self) -> None:
        super().shutdown()
        if self.may_be_cut:
            # Uvicorn waits for the others. Under TLS this one ends when its client answers, which
            # idle ones may not do.
            self.connections.discard(self)

    @property
    def may_be_cut(self) -> bool:
        """True if the connection is idle and its client has had time to read the last answer."""
        since = self.server_state.idle.get(self, math.inf)
        return self.loop.time() - since >= READ_SECONDS

    @property
    def keeps_up(self) -> bool:
        """True if the client is connected and has received everything written."""
        return not (self.flow.write_paused or self.cycle.disconnected)

    def write_now(self, content: bytes) -> None:
        """Sends more of the current body to a client that keeps up."""
        self.transport.write(self.conn.frame(content))

    def send_400_response(self, msg: str) -> None:
        """Overrides uvicorn's answer to invalid HTTP: sends JSON with the error's status."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and self.conn.refusal:
            self.transport.write(self._refused(self.conn.refusal))
        self.transport.close()

    def _refused(self, error: h11.RemoteProtocolError) -> bytes:
        status = error.error_status_hint
        # h11 appends some of the bytes that it cannot parse.
        message = TOO_LONG if status == 431 else str(error).partition(": bytearray(")[0]
        response = error_response(
            HTTPException(status, message, {"connection": "close"}), uuid.uuid4().hex
        )
        events = (
            h11.Response(status_code=status, headers=response.raw_headers),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        )
        return b"".join(self.conn.send(event) or b"" for event in events)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.server_state.idle.pop(self, None)
        super().connection_lost(exc)
        # It refers to this connection. Breaking the cycle frees the connection now. The garbage
        # collector would free thousands at once, in a pause of 40 ms.
        self.app_state = {}

    def _update_timers(self) -> None:
        """Limits the time of an idle connection, and the time for the rest of a request that is not
        running. Bytes of that rest do not restart its timer."""
        self.server_state.idle.pop(self, None)
        if self._is_idle:
            self.server_state.idle[self] = self.loop.time()
            self._limit_idle_time()
        if self._is_running or self._is_idle:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    @property
    def _is_running(self) -> bool:
        """True from a request's head until its answer's end."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_idle(self) -> bool:
        """True from the end of a request and its answer until the next head's first byte."""
        used = self.cycle is not None and self.cycle.response_complete
        return used and self.conn.is_between_requests and not self.transport.is_closing()

    def _limit_idle_time(self) -> None:
        """Starts uvicorn's timer again if the end of a body has stopped it after the answer."""
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None


def _check_head(head: h11.Request) -> None:
    if not head.http_version.startswith(b"1."):
        version = head.http_version.decode()
        raise h11.RemoteProtocolError(
            f"HTTP/{version} is not served here, HTTP/1.1 is", error_status_hint=505
        )
    fields = sum(len(name) + len(value) + len(b": \r\n") for name, value in head.headers)
    if len(head.method) + len(head.target) + fields > MAX_HEAD_BYTES:
        raise h11.RemoteProtocolError(TOO_LONG, error_status_hint=431)
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in head.headers}:
        # A proxy in front may believe the other one, and take what follows for a request.
        raise h11.RemoteProtocolError(
            "Content-Length and Transfer-Encoding contradict each other", error_status_hint=400
        )


def _in_origin_form(head: h11.Request) -> h11.Request:
    """Returns the head with only path and query of a target such as http://host/path."""
    if head.target[:1] == b"/" or not (absolute := _ABSOLUTE.fullmatch(head.target)):
        return head
    path, query = absolute.groups()
    root = b"*" if head.method == b"OPTIONS" and not query else b"/"
    target = (path or root) + query
    return h11.Request(
        method=head.method,
        headers=head.headers,
        target=target,
        http_version=head.http_version,
        _parsed=True,
    )


class HttpServer(uvicorn.Server):
    """Serves `app`; `end_calls` is called when it stops."""

    def __init__(
        self,
        app: ASGIApp,
        end_calls: Callable[[], None],
        tls: TlsConfig,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._end_calls = end_calls
        config = uvicorn.Config(
            app,
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            **_tls_options(tls),
        )
        super().__init__(config)
        self.server_state = HttpConnections(max_connections)

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Leaves signals to the router."""
        return contextlib.nullcontext()

    def start(self, host: str, port: int) -> str:
        """Listens and returns the address."""
        self._socket = _listen(host, port)
        self._serving = asyncio.create_task(self.serve([self._socket]))
        return f"{host}:{self._socket.getsockname()[1]}"

    async def stop(self, grace: float) -> None:
        """Ends calls in progress with an error. Clients have `grace` seconds to read the rest."""
        self._end_calls()
        self.config.timeout_graceful_shutdown = grace  # type: ignore[assignment]
        self.should_exit = True
        await self._serving


def _tls_options(tls: TlsConfig) -> dict[str, Any]:
    if not tls.folder:
        return {}
    folder = Path(tls.folder)
    options: dict[str, Any] = {
        "ssl_certfile": certificate_path(folder, NODE),
        "ssl_keyfile": key_path(folder, NODE),
    }
    if tls.client_certificates:
        options["ssl_ca_certs"] = str(certificate_path(folder, CLIENTS_CA))
        options["ssl_cert_reqs"] = ssl.CERT_REQUIRED
    return options


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
    except OSError:
        raise Internal(f"cannot listen on {host}:{port}; is the port taken?") from None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    listening.setblocking(False)
    return listening

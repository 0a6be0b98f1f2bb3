"""Uvicorn on the router's own event loop.

start()  listens
stop()   takes no more calls, lets those under way end, for so long, and closes
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry

from baton.core.config import TlsConfig
from baton.core.errors import Internal
from baton.core.tls import CLIENTS_CA, NODE, certificate_path, key_path
from baton.router.edges.http.app import HttpApp
from baton.router.edges.http.connection import BoundedConnection
from baton.router.edges.http.endpoint import Door
from baton.router.observe.overview import Overview
from baton.router.workers.membership import Membership

# What the kernel may hold for one client. Beyond it tokens wait where they are counted.
SEND_BYTES = 128 * 2**10


class HttpServer:
    def __init__(
        self,
        door: Door,
        membership: Membership,
        overview: Overview,
        registry: CollectorRegistry,
        *,
        open_metrics: bool = False,
        tls: TlsConfig,
    ) -> None:
        self._door = door
        config = uvicorn.Config(
            HttpApp(door, membership, overview, registry, open_metrics=open_metrics).app,
            # Its parser bounds what headers may take.
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            **_tls_options(tls),
        )
        self._server = _Server(config)

    def start(self, host: str, port: int) -> str:
        """Where it listens."""
        self._socket = _listen(host, port)
        self._serving = asyncio.create_task(self._server.serve([self._socket]))
        return f"{host}:{self._socket.getsockname()[1]}"

    async def stop(self, grace: float) -> None:
        """Calls that are still under way are told that they end here. What clients have not
        read after `grace` seconds is lost."""
        self._door.end_calls()
        self._server.config.timeout_graceful_shutdown = grace  # type: ignore[assignment]
        self._server.should_exit = True
        await self._serving


def _tls_options(tls: TlsConfig) -> dict[str, Any]:
    """uvicorn's, for what the certificates ask for."""
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


class _Server(uvicorn.Server):
    """Signals are the router's to take."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
    except OSError:
        raise Internal(f"cannot listen on {host}:{port}; is the port taken?") from None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    listening.setblocking(False)
    return listening

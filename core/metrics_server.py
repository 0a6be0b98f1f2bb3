"""Serves a process's metrics to Prometheus."""

from __future__ import annotations

from pathlib import Path
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from baton.core.config import TlsConfig
from baton.core.errors import Internal
from baton.core.tls import NODE, certificate_path, key_path


def serve_metrics(registry: CollectorRegistry, host: str, port: int, tls: TlsConfig) -> WSGIServer:
    """Port 0 takes any free one. With `tls.folder` over TLS; Prometheus needs no certificate."""
    folder = Path(tls.folder)
    pem = (str(certificate_path(folder, NODE)), str(key_path(folder, NODE)))
    try:
        server, _ = start_http_server(port, host, registry, *(pem if tls.folder else ()))
    except OSError:
        raise Internal(f"cannot serve metrics on {host}:{port}; is the port taken?") from None
    return server

"""Where a gRPC server listens: in TLS, where there are certificates."""

from __future__ import annotations

import grpc

from baton.core.tls import Identity


def listen(server: grpc.aio.Server, address: str, identity: Identity | None) -> int:
    """The port. Raises RuntimeError where it cannot be had."""
    if identity is None:
        return server.add_insecure_port(address)
    credentials = grpc.ssl_server_credentials(
        [(identity.key, identity.certificate)],
        identity.authority,
        require_client_auth=identity.authority is not None,
    )
    return server.add_secure_port(address, credentials)

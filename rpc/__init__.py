"""gRPC connections among the cluster's processes, in TLS both ways where there are certificates."""

from __future__ import annotations

import grpc

from baton.core.tls import Identity
from baton.core.types import MAX_MESSAGE_BYTES

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer whose host is gone sends nothing: ask.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # The shortest time an attempt to connect may take: a busy peer is slow to answer.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Each link has a connection of its own.
    ("grpc.use_local_subchannel_pool", 1),
]


def open_channel(address: str, identity: Identity | None) -> grpc.aio.Channel:
    if identity is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        identity.authority, identity.key, identity.certificate
    )
    return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


def listen(server: grpc.aio.Server, address: str, identity: Identity | None) -> int:
    """Returns the port; raises RuntimeError when it is taken."""
    if identity is None:
        return server.add_insecure_port(address)
    credentials = grpc.ssl_server_credentials(
        [(identity.key, identity.certificate)],
        identity.authority,
        require_client_auth=identity.authority is not None,
    )
    return server.add_secure_port(address, credentials)

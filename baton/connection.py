"""What both clients hold about a connection: where, how, as whom, and when it is ready."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc

from baton.core.tls import CA, CLIENT, certificate_path, key_path, read_pem
from baton.core.types import MAX_MESSAGE_BYTES
from baton.v1 import cluster_pb2, worker_pb2

Channel = TypeVar("Channel")

DEFAULT_ADDRESS = "127.0.0.1:50051"

API_KEY_VARIABLE = "BATON_API_KEY"
TLS_VARIABLE = "BATON_TLS"

CALL_SECONDS = 30.0
"""The default timeout of every call that does not generate."""

POLL_SECONDS = 0.2
"""Between two looks at a cluster that is not ready."""

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A router that froze or was cut off says nothing: find out by asking.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # A router that restarts is found again soon; gRPC's default grows to 2 minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


def why_not_ready(status: cluster_pb2.StatusResponse) -> str:
    """Empty when some prefill worker can push to some decode worker; else what is missing."""
    usable = [worker for worker in status.workers if worker.attached and not worker.fault]
    prefill = [worker for worker in usable if worker.member.role == worker_pb2.ROLE_PREFILL]
    decode = {w.member.worker_id for w in usable if w.member.role == worker_pb2.ROLE_DECODE}
    if not prefill:
        return "the router has no prefill worker"
    if not decode:
        return "the router has no decode worker"
    if not any(decode.intersection(worker.connected) for worker in prefill):
        return "no prefill worker is connected to a decode worker"
    return ""


class KeyedChannel:
    """A channel, for sync or asyncio, whose calls all carry an API key.

    As metadata, since credentials of a call are not sent in the clear, and on one's own machine
    a key may be.
    """

    def __init__(self, channel: Any, api_key: str) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {api_key}"),)

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        call = self._channel.unary_unary(*arguments, **options)
        return functools.partial(call, metadata=self._metadata)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        call = self._channel.unary_stream(*arguments, **options)
        return functools.partial(call, metadata=self._metadata)


def with_key(channel: Channel, api_key: str | None) -> Channel:
    """`channel` with the key that is given, or else the environment's, or else as it is."""
    found = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
    return cast(Channel, KeyedChannel(channel, found)) if found else channel


def tls_credentials(tls: str | Path | None) -> grpc.ChannelCredentials | None:
    """Of the folder that is given, or else the environment's; None where there is neither.

    The folder holds ca.pem and, where the router asks for it, client.pem and client.key.
    """
    found = os.environ.get(TLS_VARIABLE, "") if tls is None else tls
    if not found:
        return None
    folder = Path(found)
    authority = read_pem(certificate_path(folder, CA))
    if not certificate_path(folder, CLIENT).exists():
        return grpc.ssl_channel_credentials(authority)
    key, certificate = key_path(folder, CLIENT), certificate_path(folder, CLIENT)
    return grpc.ssl_channel_credentials(authority, read_pem(key), read_pem(certificate))

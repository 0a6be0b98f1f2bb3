"""A client's connection: its channel's options, API key, certificates, readiness and errors."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from baton.core import errors
from baton.core.errors import BatonError
from baton.core.tls import CA, CLIENT, certificate_path, key_path, read_pem
from baton.core.types import MAX_MESSAGE_BYTES
from baton.v1 import cluster_pb2, worker_pb2

Channel = TypeVar("Channel")

DEFAULT_ADDRESS = "127.0.0.1:50051"

API_KEY_VARIABLE = "BATON_API_KEY"
TLS_VARIABLE = "BATON_TLS"

CALL_SECONDS = 30.0
"""The default timeout of every call that does not generate."""

LONGEST_SECONDS = 1e9
"""Longer timeouts would overflow gRPC's deadline, which would then be over at once."""

POLL_SECONDS = 0.2
"""The time between two checks of a cluster that is not ready."""

_TOO_LARGE = "message larger than max"
"""In gRPC's own words, which come with the code of a server that is full."""

_DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "baton"

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A router that froze or was cut off sends nothing: detect it by pings.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # Reconnect soon after a router's restart; gRPC's default backoff grows to 2 minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


def check_address(address: str) -> str:
    """Returns the address. Refuses a URL, in which gRPC would take `http` for the host, and one
    without a port, for which gRPC would take 443."""
    if address.startswith(("http://", "https://")):
        kind = "is a URL"
    elif ":" not in address:
        kind = "has no port"
    else:
        return address
    raise errors.InvalidRequest(
        f"{address!r} {kind}; give HOST:PORT of a router's gRPC API, such as {DEFAULT_ADDRESS}"
    )


def deadline_seconds(timeout: float | None) -> float | None:
    """Returns a call's timeout as gRPC takes it: None for one that never ends the call."""
    if timeout is None or timeout > LONGEST_SECONDS:
        return None
    if math.isnan(timeout):
        raise errors.InvalidRequest("timeout is no number", field="timeout")
    return timeout


def why_not_ready(status: cluster_pb2.StatusResponse) -> str:
    """Says what is missing; empty if a prefill worker can push to a decode worker."""
    usable = [worker for worker in status.workers if worker.attached and not worker.fault]
    prefill = [worker for worker in usable if worker.member.role == worker_pb2.ROLE_PREFILL]
    decode = {w.member.worker_id for w in usable if w.member.role == worker_pb2.ROLE_DECODE}
    faults = [f"{each.member.worker_id}: {each.fault}" for each in status.workers if each.fault]
    why = f" ({'; '.join(faults)})" if faults else ""
    if not prefill:
        return f"the router has no prefill worker{why}"
    if not decode:
        return f"the router has no decode worker{why}"
    if not any(decode.intersection(worker.connected) for worker in prefill):
        return "no prefill worker is connected to a decode worker"
    return ""


class KeyedChannel:
    """A channel, sync or asyncio, whose calls all carry an API key.

    The key is metadata, since gRPC sends call credentials over TLS only. Within one machine a key
    may be sent without TLS.
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
    """Adds the given key, or else the environment's, to a channel's calls."""
    found = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
    if not (found.isascii() and found.isprintable()):
        message = "an API key has printable ASCII characters only, and no line break"
        raise errors.InvalidRequest(message, field="api_key")
    return cast(Channel, KeyedChannel(channel, found)) if found else channel


def tls_credentials(tls: str | Path | None) -> grpc.ChannelCredentials | None:
    """Reads the given folder, or else the environment's. Returns None without either.

    The folder holds ca.pem and, if the router requires it, client.pem and client.key.
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


@contextmanager
def translated(address: str) -> Iterator[None]:
    """Raises any gRPC error of a call to `address` as a BatonError."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error, address) from error
    except (ValueError, grpc.aio.UsageError) as error:  # of a channel that another thread closed
        raise errors.Unavailable("this client is closed") from error


def from_rpc_error(error: grpc.RpcError, address: str) -> BatonError:
    """Returns the error in the router's trailer, or else the nearest to gRPC's code."""
    message = error.details() or error.code().name
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    details = _details(error)
    if any(detail.Unpack(info) for detail in details) and info.domain == _DOMAIN:
        any(detail.Unpack(retry) for detail in details)
        return errors.from_reason(
            info.reason,
            message,
            field=info.metadata.get("field", ""),
            retry_after=retry.retry_delay.ToTimedelta().total_seconds(),
        )
    return _from_code(error.code(), message, address)


def _from_code(code: grpc.StatusCode, message: str, address: str) -> BatonError:
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            advice = "start one with `baton serve`"
            return errors.Unavailable(f"no Baton router answers at {address}; {advice}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded(f"{address} did not answer in time")
        case grpc.StatusCode.CANCELLED:
            return errors.Cancelled("the call was cancelled")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return errors.InvalidRequest(message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if _TOO_LARGE in message:  # waiting never helps
            return errors.InvalidRequest(f"the message is too large: {message}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return errors.Exhausted(message)
    return errors.Internal(f"{address}: {message}")


def _details(error: grpc.RpcError) -> list[any_pb2.Any]:
    """The trailer's error details; empty if it has none or they cannot be parsed."""
    trailer = cast(Iterable[tuple[str, bytes]], error.trailing_metadata() or ())
    packed = [value for key, value in trailer if key == _DETAILS_KEY]
    try:
        return list(status_pb2.Status.FromString(b"".join(packed)).details)
    except DecodeError:
        return []

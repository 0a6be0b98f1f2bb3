"""gRPC between the cluster's processes: connections (mutual TLS if there are certificates), and
errors as redacted statuses, which baton/connection.py unpacks."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2
from google.protobuf import message as protobuf
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from baton.core.errors import BatonError, DeadlineExceeded, Internal
from baton.core.tls import Identity
from baton.core.types import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

DOMAIN = "baton"

Context = grpc.aio.ServicerContext[Any, Any]
Answer = TypeVar("Answer")

# A trailer may have 8 KiB. It holds the message twice, once with three bytes for each byte
# outside ASCII.
_MESSAGE_BYTES = 1200

# Addresses of processes and paths of files, which are for the log only.
_PRIVATE = re.compile(
    r"""
    (?:ipv[46]|unix|dns):[\w.:/%\[\]-]+                # as gRPC writes addresses
    | \b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b              # 10.0.0.7:50051
    | \[[0-9a-fA-F:]{2,}(?:%\w+)?\](?::\d+)?            # [::1]:50051
    | \b[\w-]+(?:\.[\w-]+)+:\d{2,5}\b                   # gpu-7.local:50051
    | \blocalhost:\d+\b
    | (?<![\w.:/])~?/(?:[\w.+@-]+/)+[\w.+@-]*           # /models/tiny/config.json
    | \b0x[0-9a-fA-F]{4,}\b                             # <function at 0x7f12…>
    """,
    re.VERBOSE,
)

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer whose host is gone sends nothing, so ping it.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Minimum timeout of an attempt to connect, since a busy peer is slow to answer.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Each link has a connection of its own.
    ("grpc.use_local_subchannel_pool", 1),
]


def open_channel(address: str, identity: Identity | None) -> grpc.aio.Channel:
    if identity is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, _credentials(identity), options=CHANNEL_OPTIONS)


def open_blocking_channel(address: str, identity: Identity | None) -> grpc.Channel:
    """For threads without an event loop."""
    if identity is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, _credentials(identity), options=CHANNEL_OPTIONS)


def _credentials(identity: Identity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(identity.authority, identity.key, identity.certificate)


def listen(server: grpc.aio.Server, address: str, identity: Identity | None) -> int:
    """Adds an address to the server. Returns its port; raises RuntimeError if it is taken."""
    if identity is None:
        return server.add_insecure_port(address)
    credentials = grpc.ssl_server_credentials(
        [(identity.key, identity.certificate)],
        identity.authority,
        require_client_auth=identity.authority is not None,
    )
    return server.add_secure_port(address, credentials)


def redact(text: str) -> str:
    return _PRIVATE.sub("…", text)


def redact_error(error: BatonError) -> BatonError:
    """The error as a caller may see it. A caller's own mistake holds only what the caller sent, and
    is returned unchanged."""
    if error.http_status < 500:
        return error
    return type(error)(redact(error.message), field=error.field, retry_after=error.retry_after)


def to_status(error: BatonError) -> grpc.Status:
    """The argument of `context.abort_with_status`."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if error.field:
        info.metadata["field"] = error.field
    details = [_pack(info)]
    if error.retry_after:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(timedelta(seconds=error.retry_after))
        details.append(_pack(retry))
    code: int = grpc.StatusCode[error.grpc_code].value[0]
    return rpc_status.to_status(
        status_pb2.Status(code=code, message=_shorten(error.message), details=details)
    )


def _pack(message: protobuf.Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _shorten(message: str) -> str:
    encoded = message.encode()
    if len(encoded) <= _MESSAGE_BYTES:
        return message
    return encoded[:_MESSAGE_BYTES].decode(errors="ignore") + "…"


def public_error(error: Exception) -> BatonError:
    """The error as a caller may see it. An unexpected one is logged and becomes Internal. Missed
    deadlines are not logged, since overload may cause thousands; the metrics count them."""
    if not isinstance(error, BatonError):
        log.error("a request failed unexpectedly", exc_info=error)
        error = Internal("the server failed; its log has the details")
    elif error.http_status >= 500 and not isinstance(error, DeadlineExceeded):
        log.warning("a request failed: %s: %s", error.reason, error.message)
    return redact_error(error)


async def abort(context: Context, error: Exception) -> NoReturn:
    """Ends a call with a typed error."""
    await context.abort_with_status(to_status(public_error(error)))
    raise AssertionError("abort_with_status returned")


def unary(
    method: Callable[..., Awaitable[Answer]],
) -> Callable[[Any, Any, Context], Awaitable[Answer]]:
    """A unary method whose errors become statuses. It gets the context if it has a parameter for
    it."""
    arguments = len(inspect.signature(method).parameters)

    @functools.wraps(method)
    async def call(self: Any, message: Any, context: Context) -> Answer:
        try:
            return await method(*(self, message, context)[:arguments])
        except Exception as error:  # noqa: BLE001 the edge of the process
            await abort(context, error)

    return call

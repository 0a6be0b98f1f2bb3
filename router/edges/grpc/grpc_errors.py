"""Packs an error of ours into a gRPC status; baton/errors.py unpacks it."""

from __future__ import annotations

from datetime import timedelta

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from baton.core.errors import BatonError, translation

DOMAIN = "baton"

_MESSAGE_BYTES = 1200
"""A trailer may have 8 KiB in all. It holds the message twice, once with every
byte outside ASCII written as three."""


def to_status(error: BatonError) -> grpc.Status:
    """What to pass to `context.abort_with_status`."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if error.field:
        info.metadata["field"] = error.field
    details = [_packed(info)]
    if error.retry_after:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(timedelta(seconds=error.retry_after))
        details.append(_packed(retry))
    code: int = grpc.StatusCode[translation(error).grpc].value[0]
    return rpc_status.to_status(
        status_pb2.Status(code=code, message=_shortened(error.message), details=details)
    )


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _shortened(message: str) -> str:
    encoded = message.encode()
    if len(encoded) <= _MESSAGE_BYTES:
        return message
    return encoded[:_MESSAGE_BYTES].decode(errors="ignore") + "…"

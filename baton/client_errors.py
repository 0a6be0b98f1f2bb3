"""Turns what gRPC raises into Baton's own errors.

The router packs an error into the call's trailer (router/edges/grpc/grpc_errors.py); this
unpacks it. A call that failed before or beside the router has only gRPC's code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from baton.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    Internal,
    InvalidRequest,
    Unavailable,
    from_reason,
)

_DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "baton"


@contextmanager
def translated(address: str) -> Iterator[None]:
    """Raises any error of a call to `address` as a BatonError, gRPC's own as its cause."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error, address) from error


def from_rpc_error(error: grpc.RpcError, address: str) -> BatonError:
    """The error that the router sent, or the nearest to gRPC's code when it sent none."""
    message = error.details() or error.code().name
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    details = _details(error)
    if any(detail.Unpack(info) for detail in details) and info.domain == _DOMAIN:
        any(detail.Unpack(retry) for detail in details)
        return from_reason(
            info.reason,
            message,
            field=info.metadata.get("field", ""),
            retry_after=retry.retry_delay.ToTimedelta().total_seconds(),
        )
    return _from_code(error.code(), message, address)


def _from_code(code: grpc.StatusCode, message: str, address: str) -> BatonError:
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(
                f"no Baton router answers at {address}; start one with `baton serve`"
            )
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{address} did not answer in time")
        case grpc.StatusCode.CANCELLED:
            return Cancelled("the call was cancelled")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest(message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Exhausted(message)
    return Internal(f"{address}: {message}")


def _details(error: grpc.RpcError) -> list[any_pb2.Any]:
    """What the call's trailer holds; nothing when it cannot be read."""
    trailer = cast(Iterable[tuple[str, bytes]], error.trailing_metadata() or ())
    packed = [value for key, value in trailer if key == _DETAILS_KEY]
    try:
        return list(status_pb2.Status.FromString(b"".join(packed)).details)
    except DecodeError:
        return []

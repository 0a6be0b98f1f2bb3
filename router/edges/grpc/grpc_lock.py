"""API keys at the gRPC door: a call without one reaches no service but health and reflection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from baton.core.errors import BatonError, PermissionDenied
from baton.router.edges.callers import KeyRing
from baton.router.edges.grpc.grpc_errors import to_status
from baton.v1 import cluster_pb2

OPEN = (health.SERVICE_NAME, reflection.SERVICE_NAME)
_ADMIN = cluster_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
# What shows the cluster, and neither changes it nor tells who else asked what.
_FOR_ALL_KEYS = {
    f"/{_ADMIN}/{name}" for name in ("Status", "Pools", "Plan", "Timing", "Diagnose", "Trends")
}

Metadata = Iterable[tuple[str, str | bytes]]

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Find = Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]


class KeyLock(grpc.aio.ServerInterceptor):
    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Find, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        try:
            self._check(handler_call_details)
        except BatonError as error:
            return _refusing(handler, error)
        return handler

    def _check(self, details: grpc.HandlerCallDetails) -> None:
        service = details.method.strip("/").partition("/")[0]
        if service in OPEN:
            return
        caller = self._keys.caller(authorization(details.invocation_metadata or ()))
        if service == _ADMIN and details.method not in _FOR_ALL_KEYS and not caller.admin:
            raise PermissionDenied("this needs an admin's API key")


def authorization(metadata: Metadata) -> str:
    """The header that names the caller; empty where there is none."""
    return metadata_value(metadata, "authorization")


def metadata_value(metadata: Metadata, key: str) -> str:
    """The first of a key; empty where there is none."""
    value = next((value for name, value in metadata if name == key), "")
    return value if isinstance(value, str) else ""


def _refusing(handler: Handler, error: BatonError) -> Handler:
    """In place of `handler`, of which a response may be a stream."""

    async def refuse(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        await context.abort_with_status(to_status(error))
        raise AssertionError("abort_with_status returned")

    make = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(refuse, handler.request_deserializer, handler.response_serializer)

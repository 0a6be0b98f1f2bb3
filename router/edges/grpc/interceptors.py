"""What happens to a gRPC call before its servicer: the API key is checked, the message decoded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from baton.core.errors import BatonError, InvalidRequest, PermissionDenied
from baton.router.edges.auth import KeyRing
from baton.rpc.statuses import Context, to_status
from baton.v1 import cluster_pb2, inference_pb2

# Need no key.
_OPEN = (health.SERVICE_NAME, reflection.SERVICE_NAME)
_ADMIN = cluster_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
# Need any key: they change nothing and show nothing of other callers.
_READ_ONLY = {
    f"/{_ADMIN}/{name}" for name in ("Status", "Pools", "Plan", "Timing", "Diagnose", "Trends")
}
_PACKAGE = f"/{inference_pb2.DESCRIPTOR.package}."

Metadata = Iterable[tuple[str, str | bytes]]

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Find = Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]


def authorization(metadata: Metadata) -> str:
    return metadata_value(metadata, "authorization")


def metadata_value(metadata: Metadata, key: str) -> str:
    """The first value of a key, or an empty string."""
    value = next((value for name, value in metadata if name == key), "")
    return value if isinstance(value, str) else ""


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Find, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        try:
            self._check(handler_call_details)
        except BatonError as error:
            return _refuse(handler, error) if handler else None
        return handler

    def _check(self, details: grpc.HandlerCallDetails) -> None:
        service = details.method.strip("/").partition("/")[0]
        if service in _OPEN:
            return
        caller = self._keys.caller(authorization(details.invocation_metadata or ()))
        if service == _ADMIN and details.method not in _READ_ONLY and not caller.admin:
            raise PermissionDenied("this needs an admin's API key")


class DecodeInterceptor(grpc.aio.ServerInterceptor):
    """Decodes the messages of our own services: gRPC's own error would name our classes."""

    async def intercept_service(
        self, continuation: Find, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        ours = handler_call_details.method.startswith(_PACKAGE)
        return _decode_here(handler) if handler and ours else handler


def _decode_here(handler: Handler) -> Handler:
    decode: Any = handler.request_deserializer
    answer: Any = handler.unary_stream or handler.unary_unary

    async def call(content: bytes, context: Context) -> Any:
        try:
            message = decode(content)
        except DecodeError:
            invalid = InvalidRequest("the message cannot be decoded: it is damaged or no request")
            await context.abort_with_status(to_status(invalid))
        return await answer(message, context)

    return _replace(handler, call, None)


def _refuse(handler: Handler, error: BatonError) -> Handler:
    async def call(request: object, context: Context) -> NoReturn:
        await context.abort_with_status(to_status(error))
        raise AssertionError("abort_with_status returned")

    return _replace(handler, call, handler.request_deserializer)


def _replace(handler: Handler, call: Any, deserializer: Any) -> Handler:
    """All our methods take one message; some answer with a stream."""
    make = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(call, deserializer, handler.response_serializer)

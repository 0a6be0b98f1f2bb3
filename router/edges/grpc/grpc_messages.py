"""Messages that cannot be read, told as what they are: gRPC itself would name our classes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from baton.core.errors import InvalidRequest
from baton.router.edges.grpc.grpc_errors import to_status
from baton.v1 import inference_pb2

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Find = Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]

_OURS = f"/{inference_pb2.DESCRIPTOR.package}."


class ReadMessages(grpc.aio.ServerInterceptor):
    """Has our own services' requests read here."""

    async def intercept_service(
        self, continuation: Find, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        ours = handler_call_details.method.startswith(_OURS)
        return _reading(handler) if handler and ours else handler


def _reading(handler: Handler) -> Handler:
    """All of ours take one message."""
    read: Any = handler.request_deserializer
    answer: Any = handler.unary_stream or handler.unary_unary

    async def call(content: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            message = read(content)
        except DecodeError:
            unreadable = InvalidRequest("the message cannot be read: it is damaged, or no request")
            await context.abort_with_status(to_status(unreadable))
        return await answer(message, context)

    make = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(call, None, handler.response_serializer)

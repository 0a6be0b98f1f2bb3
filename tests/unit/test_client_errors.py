"""An error of ours, from the server that packs it to the client that raises it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from scripted_router import ScriptedRouter

import baton
from baton import (
    AsyncClient,
    BatonError,
    Cancelled,
    Client,
    DeadlineExceeded,
    Exhausted,
    Internal,
    InvalidRequest,
    PromptTooLong,
    Unavailable,
)
from baton.rpc import to_status
from baton.v1 import inference_pb2
from baton.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server

ERROR_TYPES = [
    value
    for value in vars(baton).values()
    if isinstance(value, type) and issubclass(value, BatonError)
]


@pytest.mark.parametrize("error_type", ERROR_TYPES)
def test_every_error_arrives_as_the_type_that_was_raised(
    client: Client, router: ScriptedRouter, error_type: type[BatonError]
) -> None:
    router.error = error_type("it is\nso: ✗", field="max_tokens")
    with pytest.raises(BatonError) as caught:
        client.generate("hello")
    # BatonError itself has Internal's reason.
    assert type(caught.value) is (Internal if error_type is BatonError else error_type)
    assert caught.value.message == "it is\nso: ✗"
    assert caught.value.field == "max_tokens"


def test_an_error_has_its_retry_delay(client: Client, router: ScriptedRouter) -> None:
    router.error = Exhausted("full", retry_after=2.5)
    with pytest.raises(Exhausted) as caught:
        client.generate("hello")
    assert caught.value.retry_after == 2.5


def test_an_error_after_some_tokens_leaves_those_tokens(
    client: Client, router: ScriptedRouter
) -> None:
    router.error = Exhausted("full")
    stream = client.stream("hello")
    assert [next(stream).text for _ in range(3)] == router.pieces
    with pytest.raises(Exhausted):
        next(stream)


@pytest.mark.parametrize("character", ["x", "字", "🙂", "\n"])
def test_a_message_too_long_for_a_trailer_is_shortened(
    client: Client, router: ScriptedRouter, character: str
) -> None:
    router.error = PromptTooLong(character * 100_000)
    with pytest.raises(PromptTooLong) as caught:
        client.generate("hello")
    assert caught.value.message.startswith(character * 100)
    assert caught.value.message.endswith("…")


def foreign_status(code: int, domain: str | None) -> grpc.Status:
    """An error as some other gRPC server, or a proxy, would send it."""
    details = []
    if domain is not None:
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.ErrorInfo(reason="PROMPT_TOO_LONG", domain=domain))
        details = [detail]
    return rpc_status.to_status(status_pb2.Status(code=code, message="no", details=details))


@pytest.mark.parametrize("domain", [None, "elsewhere"])
@pytest.mark.parametrize(
    ("code", "error_type"),
    [
        (code_pb2.UNAVAILABLE, Unavailable),
        (code_pb2.DEADLINE_EXCEEDED, DeadlineExceeded),
        (code_pb2.CANCELLED, Cancelled),
        (code_pb2.INVALID_ARGUMENT, InvalidRequest),
        (code_pb2.RESOURCE_EXHAUSTED, Exhausted),
        (code_pb2.PERMISSION_DENIED, Internal),
    ],
)
def test_without_details_of_ours_the_code_decides(
    monkeypatch: pytest.MonkeyPatch,
    client: Client,
    router: ScriptedRouter,
    code: int,
    error_type: type[BatonError],
    domain: str | None,
) -> None:
    monkeypatch.setattr("scripted_router.to_status", lambda _: foreign_status(code, domain))
    router.error = Internal("replaced")
    with pytest.raises(BatonError) as caught:
        client.generate("hello")
    assert type(caught.value) is error_type


@pytest.mark.parametrize("error_type", ERROR_TYPES)
async def test_every_error_reaches_the_async_client(
    async_client: AsyncClient, router: ScriptedRouter, error_type: type[BatonError]
) -> None:
    router.error = error_type("it is so", field="max_tokens")
    with pytest.raises(error_type if error_type is not BatonError else Internal) as caught:
        await async_client.generate("hello")
    assert (caught.value.message, caught.value.field) == ("it is so", "max_tokens")


class RefusingRouter(InferenceServicer):
    """An asyncio server, as the real router is one, that refuses everything."""

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        await context.abort_with_status(to_status(PromptTooLong("too long", field="text")))
        yield inference_pb2.GenerateResponse()

    ListModels = Tokenize = Detokenize = None


async def test_an_error_from_an_asyncio_server_arrives_whole() -> None:
    server = grpc.aio.server()
    add_InferenceServicer_to_server(RefusingRouter(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        with pytest.raises(PromptTooLong, match="too long") as caught:
            await client.generate("hello")
    await server.stop(None)
    assert caught.value.field == "text"

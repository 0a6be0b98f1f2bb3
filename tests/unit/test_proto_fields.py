"""Every field of every message that callers send, with whatever its type can hold."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import fields

import grpc
import pytest
from front_door import front_door_beside
from hypothesis import HealthCheck, given, settings
from proto_strategies import messages

from baton.core.errors import InvalidRequest
from baton.core.types import Request, Sampling
from baton.router.edges.grpc.protobuf import parse_request
from baton.v1 import cluster_pb2, inference_pb2, open_inference_pb2
from baton.v1.inference_pb2 import GenerateRequest

QUICK = settings(max_examples=300, deadline=None, derandomize=True)
OVER_THE_WIRE = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
FINE = (
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
)
SERVICES = {
    **inference_pb2.DESCRIPTOR.services_by_name,
    "Admin": cluster_pb2.DESCRIPTOR.services_by_name["Admin"],
    **open_inference_pb2.DESCRIPTOR.services_by_name,
}
METHODS = [method for service in SERVICES.values() for method in service.methods]


def read(message: GenerateRequest) -> Request | InvalidRequest:
    try:
        return parse_request(message)
    except InvalidRequest as error:
        return error


@given(messages(GenerateRequest.DESCRIPTOR))
@QUICK
def test_a_request_is_parsed_or_refused_with_its_field(message: GenerateRequest) -> None:
    request = read(message)
    if isinstance(request, InvalidRequest):
        assert request.field
        return
    numbers = [getattr(request.sampling, field.name) for field in fields(Sampling)]
    assert all(math.isfinite(number) for number in numbers if isinstance(number, float))
    assert 1 <= request.n <= 16


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    with front_door_beside() as door, grpc.insecure_channel(door.address) as channel:
        yield channel


def bounded(message: object) -> object:
    """Long answers are right, and take long."""
    if isinstance(message, GenerateRequest):
        message.max_tokens = message.max_tokens % 4
    return message


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_call_ends_with_an_answer_or_a_callers_error(
    channel: grpc.Channel, method: object
) -> None:
    kind = method.input_type  # type: ignore[attr-defined]
    path = f"/{method.containing_service.full_name}/{method.name}"  # type: ignore[attr-defined]
    call = channel.unary_stream(path, lambda message: message.SerializeToString(), bytes)

    @given(messages(kind))
    @OVER_THE_WIRE
    def try_it(message: object) -> None:
        answer = call(bounded(message), timeout=20)
        with contextlib.suppress(grpc.RpcError):
            list(answer)
        assert answer.code() in FINE, answer.details()

    try_it()


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_undecodable_messages_are_refused(channel: grpc.Channel, method: object) -> None:
    path = f"/{method.containing_service.full_name}/{method.name}"  # type: ignore[attr-defined]
    with pytest.raises(grpc.RpcError, match="cannot be decoded") as refused:
        list(channel.unary_stream(path, bytes, bytes)(b"\xff\xff", timeout=20))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

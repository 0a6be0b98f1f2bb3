from __future__ import annotations

import grpc
import pytest

from baton.core import errors, wire
from baton.core.types import AttemptKey, FinishReason, Role, Sampling, Work


def every_error() -> list[type[errors.BatonError]]:
    return list(errors._BY_REASON.values())


@pytest.mark.parametrize("kind", every_error())
def test_every_error_has_a_grpc_code_and_an_http_status(kind: type[errors.BatonError]) -> None:
    assert grpc.StatusCode[kind.grpc_code] is not grpc.StatusCode.OK
    assert 400 <= kind.http_status < 600


@pytest.mark.parametrize("kind", every_error())
def test_an_error_survives_the_wire(kind: type[errors.BatonError]) -> None:
    message = wire.failed_to(AttemptKey("r", 1), kind("what happened"))
    back = wire.failed_from(message.failed)
    assert (type(back).reason, back.message) == (kind.reason, "what happened")


def test_an_unknown_reason_is_our_fault() -> None:
    assert isinstance(errors.from_reason("FROM_THE_FUTURE", "x"), errors.Internal)


def test_work_survives_the_wire() -> None:
    sampling = Sampling(0.5, 3, 0.25, 0.125, 1.5, -0.5, 0.75, 2**64 - 1)
    work = Work(AttemptKey("r", 7), [5, 0, 9], sampling, 11, frozenset({2, 1}), prediction=(3, 4))
    assert wire.work_from(wire.work_to(work)) == work


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_a_finish_reason_survives_the_wire(reason: FinishReason | None) -> None:
    assert wire.finish_from(wire.finish_to(reason)) is reason


@pytest.mark.parametrize("role", list(Role))
def test_a_role_survives_the_wire(role: Role) -> None:
    assert wire.role_from(wire.role_to(role)) is role

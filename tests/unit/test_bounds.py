"""One table of bounds for gRPC, HTTP and workers."""

from __future__ import annotations

import dataclasses

import pytest
from http_bodies import chat, request

from baton.core import bounds
from baton.core.bounds import check_work
from baton.core.errors import InvalidSampling
from baton.core.types import AttemptKey, Sampling, Work
from baton.router.edges.grpc.protobuf import parse_request
from baton.v1 import inference_pb2 as pb

WORK = Work(AttemptKey("id", 0), [1], Sampling(), 1, frozenset())
BEYOND = 1e-3


def parse_grpc(**sampling: float) -> Sampling:
    message = pb.GenerateRequest(text="x", sampling=pb.SamplingParameters(**sampling))  # type: ignore[arg-type]
    return parse_request(message).sampling


@pytest.mark.parametrize("name", bounds.SAMPLING)
def test_sampling_values_at_the_bounds_are_accepted_everywhere(name: str) -> None:
    least, most, above = bounds.SAMPLING[name]
    for value in (least + BEYOND if above else least, most):
        parse_grpc(**{name: value})
        chat(**{name: value})
        sampling = dataclasses.replace(Sampling(), **{name: value})  # type: ignore[arg-type]
        check_work(dataclasses.replace(WORK, sampling=sampling), 10)


@pytest.mark.parametrize("name", bounds.SAMPLING)
def test_sampling_values_beyond_the_bounds_are_refused_everywhere(name: str) -> None:
    least, most, above = bounds.SAMPLING[name]
    for value in (least if above else least - BEYOND, most + BEYOND, float("nan")):
        with pytest.raises(InvalidSampling) as refused:
            parse_grpc(**{name: value})
        assert refused.value.field == f"sampling.{name}"
        with pytest.raises(InvalidSampling) as refused:
            chat(**{name: value})
        assert refused.value.field == name
        sampling = dataclasses.replace(Sampling(), **{name: value})  # type: ignore[arg-type]
        with pytest.raises(InvalidSampling) as refused:
            check_work(dataclasses.replace(WORK, sampling=sampling), 10)
        assert refused.value.field == name


def test_top_p_zero_keeps_one_token_over_grpc_and_http() -> None:
    for sampling in (parse_grpc(top_p=0.0), request(chat(top_p=0)).sampling):
        assert (sampling.top_k, sampling.top_p) == (1, 1.0)


def test_a_worker_refuses_a_bias_beyond_the_bounds() -> None:
    sampling = Sampling(logit_bias=((5, 101.0),))
    with pytest.raises(InvalidSampling, match="logit_bias of token 5"):
        check_work(dataclasses.replace(WORK, sampling=sampling), 10)

"""Every bad request has an error of its own, and the next request works."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable

import grpc
import pytest
from processes import ProcessCluster

import baton
from baton import Client
from baton.v1 import cluster_pb2, inference_pb2_grpc
from baton.v1 import inference_pb2 as pb

CASES: dict[str, tuple[Callable[[Client], object], type[baton.BatonError], str]] = {
    "empty text": (lambda c: c.generate(""), baton.InvalidRequest, "empty"),
    "no token ids": (lambda c: c.generate([]), baton.InvalidRequest, "empty"),
    "no messages": (lambda c: c.chat([]), baton.InvalidRequest, "at least one message"),
    "a message without a role": (
        lambda c: c.chat([("", "hi")]),
        baton.InvalidRequest,
        r"messages\[0\].role",
    ),
    "a prompt longer than the context": (
        lambda c: c.generate([5] * 9000),
        baton.PromptTooLong,
        "9000 tokens",
    ),
    "a prompt that fills the context": (
        lambda c: c.generate([5] * 8192),
        baton.PromptTooLong,
        "8191",
    ),
    "a token outside the vocabulary": (
        lambda c: c.generate([1, 49152]),
        baton.TokenOutOfRange,
        "49152",
    ),
    "no tokens wanted": (
        lambda c: c.generate("x", max_tokens=0),
        baton.InvalidRequest,
        "max_tokens",
    ),
    "temperature below 0": (
        lambda c: c.generate("x", temperature=-0.1),
        baton.InvalidSampling,
        "temperature",
    ),
    "temperature that is no number": (
        lambda c: c.generate("x", temperature=math.nan),
        baton.InvalidSampling,
        "temperature",
    ),
    "endless temperature": (
        lambda c: c.generate("x", temperature=math.inf),
        baton.InvalidSampling,
        "temperature",
    ),
    "top_p below 0": (lambda c: c.generate("x", top_p=-0.1), baton.InvalidSampling, "top_p"),
    "top_p above 1": (lambda c: c.generate("x", top_p=1.1), baton.InvalidSampling, "top_p"),
    "min_p below 0": (lambda c: c.generate("x", min_p=-1.0), baton.InvalidSampling, "min_p"),
    "repetition penalty of 0": (
        lambda c: c.generate("x", repetition_penalty=0.0),
        baton.InvalidSampling,
        "repetition_penalty",
    ),
    "presence penalty above 2": (
        lambda c: c.generate("x", presence_penalty=2.5),
        baton.InvalidSampling,
        "presence_penalty",
    ),
    "frequency penalty that is no number": (
        lambda c: c.generate("x", frequency_penalty=math.nan),
        baton.InvalidSampling,
        "frequency_penalty",
    ),
    "an empty stop string": (lambda c: c.generate("x", stop=[""]), baton.InvalidRequest, "stop"),
    "an unknown model": (
        lambda c: c.generate("x", model="gpt-5"),
        baton.UnknownModel,
        "shallow",
    ),
    "detokenizing a token outside the vocabulary": (
        lambda c: c.detokenize([49152]),
        baton.TokenOutOfRange,
        "49152",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_request_gets_its_own_error_and_the_next_works(
    shallow_idle: ProcessCluster, case: str
) -> None:
    call, error, words = CASES[case]
    with shallow_idle.client() as client:
        with pytest.raises(error, match=words) as caught:
            call(client)
        assert type(caught.value) is error
        assert client.generate([504, 3575], max_tokens=1).usage.completion_tokens == 1


def test_a_request_without_a_prompt_is_refused_with_details(shallow_idle: ProcessCluster) -> None:
    with grpc.insecure_channel(shallow_idle.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(pb.GenerateRequest()))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt" in caught.value.details()


def test_half_a_character_is_refused_by_the_wire_itself(shallow_idle: ProcessCluster) -> None:
    with shallow_idle.client() as client, pytest.raises((ValueError, baton.InvalidRequest)):
        client.generate("\ud800")


def test_a_top_p_of_0_is_greedy(shallow_idle: ProcessCluster) -> None:
    with shallow_idle.client() as client:
        best = client.generate([504, 3575], max_tokens=8)
        drawn = client.generate([504, 3575], max_tokens=8, temperature=2.0, top_p=0.0)
        assert drawn.choices[0].token_ids == best.choices[0].token_ids


def test_an_enormous_top_k_keeps_every_token(shallow_idle: ProcessCluster) -> None:
    with shallow_idle.client() as client:
        wide = client.generate("Hello", max_tokens=4, temperature=1.0, top_k=2**32 - 1, seed=5)
        plain = client.generate("Hello", max_tokens=4, temperature=1.0, seed=5)
    assert wide.token_ids == plain.token_ids


SOUND = {
    "Inference/Generate": pb.GenerateRequest(text="The capital of France is", max_tokens=1),
    "Inference/Tokenize": pb.TokenizeRequest(text="Paris"),
    "Inference/Detokenize": pb.DetokenizeRequest(token_ids=[504, 3575]),
    "Admin/Timing": cluster_pb2.TimingRequest(request_id="nobody's"),
}


def damaged(draw: random.Random, content: bytes) -> bytes:
    """With bytes changed, put in or cut off; or nothing like it."""
    if draw.random() < 0.1:
        return draw.randbytes(draw.randrange(64))
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(changed) + 1)
        changed[place : place + draw.randint(0, 1)] = draw.randbytes(draw.randint(0, 2))
    return bytes(changed)


def test_five_hundred_damaged_messages_leave_nothing_behind(shallow_idle: ProcessCluster) -> None:
    draw = random.Random(7)
    codes = set()
    with grpc.insecure_channel(shallow_idle.address) as channel:
        for _ in range(500):
            method, message = draw.choice(list(SOUND.items()))
            call = channel.unary_stream(f"/baton.v1.{method}", bytes, bytes)
            # What still makes sense may ask for a long answer.
            answer = call(damaged(draw, message.SerializeToString()), timeout=0.5)
            with contextlib.suppress(grpc.RpcError):
                list(answer)
            codes.add(answer.code())
    status = grpc.StatusCode
    assert codes == {
        status.OK,
        status.INVALID_ARGUMENT,
        status.NOT_FOUND,
        status.DEADLINE_EXCEEDED,
    }
    with shallow_idle.client() as client:
        assert client.generate([504, 3575], max_tokens=1).usage.completion_tokens == 1

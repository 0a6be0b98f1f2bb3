from __future__ import annotations

import pytest

from baton.core.errors import InvalidRequest
from baton.core.types import ChatPrompt, Message, Sampling
from baton.router.edges.grpc.protobuf import parse_request
from baton.v1 import inference_pb2 as pb


def test_defaults_are_greedy_and_unlimited() -> None:
    request = parse_request(pb.GenerateRequest(text="hi"))
    assert request.prompt == "hi"
    assert request.sampling == Sampling(seed=request.sampling.seed)
    assert request.max_tokens is None
    assert request.request_id
    assert request.n == 1


def test_a_seed_is_drawn_anew_for_every_request() -> None:
    seeds = {parse_request(pb.GenerateRequest(text="hi")).sampling.seed for _ in range(8)}
    assert len(seeds) == 8


def test_a_seed_of_zero_is_a_seed() -> None:
    sampling = pb.SamplingParameters(seed=0)
    assert parse_request(pb.GenerateRequest(text="hi", sampling=sampling)).sampling.seed == 0


def test_answers_to_one_request_have_seeds_of_their_own() -> None:
    sampling = Sampling(temperature=1.0, seed=2**64 - 1)
    seeds = [sampling.for_answer(index).seed for index in range(3)]
    assert seeds == [2**64 - 1, 0x9E3779B97F4A7C14, 0x3C6EF372FE94F829]
    assert sampling.for_answer(0) == sampling


def test_a_prompt_may_be_a_chat_or_token_ids() -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    assert parse_request(pb.GenerateRequest(chat=chat)).prompt == ChatPrompt(
        (Message("user", "hi"),)
    )
    ids = pb.TokenIds(ids=[3, 4])
    assert parse_request(pb.GenerateRequest(token_ids=ids)).prompt == (3, 4)


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(),
        pb.GenerateRequest(text="x", max_tokens=0),
        pb.GenerateRequest(text="x", n=0),
        pb.GenerateRequest(text="x", n=17),
        pb.GenerateRequest(text="x", stop=["s"] * 17),
        pb.GenerateRequest(text="x", stop=["s" * 1025]),
        pb.GenerateRequest(text="x", stop_token_ids=[1] * 1025),
        pb.GenerateRequest(text="x", request_id="r" * 129),
        pb.GenerateRequest(text="x", request_id="one\nWARNING two"),
        pb.GenerateRequest(
            chat=pb.Chat(
                messages=[pb.ChatMessage(role="user", content="x")],
                tool_choice=pb.ToolChoice(mode=9),  # type: ignore[arg-type]
            )
        ),
        pb.GenerateRequest(
            chat=pb.Chat(
                messages=[pb.ChatMessage(role="user", content="x")],
                tools=[pb.Tool(name="f", parameters='{"type": "array"}')],
            )
        ),
        pb.GenerateRequest(text="x", cache_salt="s" * 257),
        pb.GenerateRequest(text="x", priority=-1001),
        pb.GenerateRequest(text="x", cache_hint=pb.CacheHint(ttl_seconds=86401)),
        pb.GenerateRequest(text="x", prediction="s" * (2**17 + 1)),
        pb.GenerateRequest(text="x", sampling=pb.SamplingParameters(temperature=float("nan"))),
        pb.GenerateRequest(text="x", sampling=pb.SamplingParameters(top_p=-0.5)),
        pb.GenerateRequest(text="x", sampling=pb.SamplingParameters(logit_bias={5: 101.0})),
        pb.GenerateRequest(text="x", sampling=pb.SamplingParameters(logit_bias={5: float("nan")})),
        pb.GenerateRequest(
            text="x",
            sampling=pb.SamplingParameters(logit_bias=dict.fromkeys(range(1025), 1.0)),
        ),
        pb.GenerateRequest(text="x", logprobs=21),
        pb.GenerateRequest(text="x", sampling=pb.SamplingParameters(no_repeat_ngram_size=65)),
        pb.GenerateRequest(
            text="x",
            sampling=pb.SamplingParameters(bad_words_ids=pb.TokenRuns(runs=[pb.TokenIds()])),
        ),
        pb.GenerateRequest(
            text="x",
            sampling=pb.SamplingParameters(suppress_tokens=pb.TokenIds(ids=range(16_385))),
        ),
    ],
)
def test_a_request_outside_the_limits_is_refused_with_its_field(
    message: pb.GenerateRequest,
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(message)
    assert caught.value.field

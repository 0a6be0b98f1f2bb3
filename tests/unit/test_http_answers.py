"""Answers and errors as HTTP returns them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from openapi_document import document

from baton.core.errors import (
    BatonError,
    DeadlineExceeded,
    Exhausted,
    Internal,
    InvalidRequest,
    LayoutMismatch,
    NotServed,
    PoisonRequest,
    PromptTooLong,
    SlowReader,
    Unavailable,
    UnknownModel,
    WorkerLost,
)
from baton.core.generation_defaults import NO_DEFAULTS
from baton.core.proto_json import Json
from baton.router.answers.answer_events import (
    AnswerDelta,
    AnswerEvent,
    ScoredToken,
    TokenScore,
    ToolCallDelta,
)
from baton.router.edges.http.answer_renderer import AnswerRenderer
from baton.router.edges.http.choice_renderer import (
    ChatRenderer,
    CompletionRenderer,
)
from baton.router.edges.http.completion_request import CompletionRequest
from baton.router.edges.http.http_errors import error_response
from baton.v1 import inference_pb2 as pb
from tests.support.http_bodies import addressed

SECRET = "/home/someone 10.0.0.7:5100"


def started(prompt_tokens: int) -> pb.Started:
    return pb.Started(request_id="id", prompt_tokens=prompt_tokens, n=2)


def finished(
    index: int, tokens: int, reason: pb.FinishReason.ValueType = pb.FINISH_REASON_STOP
) -> pb.Finished:
    usage = pb.Usage(prompt_tokens=3, completion_tokens=tokens, cached_tokens=2)
    return pb.Finished(finish_reason=reason, usage=usage, index=index)


EVENTS: list[AnswerEvent] = [
    started(3),
    AnswerDelta("a", [1], 0),
    AnswerDelta("", [9], 1),
    AnswerDelta("x", [2], 1),
    AnswerDelta("b", [3], 0),
    finished(0, 2),
    finished(1, 2, pb.FINISH_REASON_LENGTH),
]


Renderer = AnswerRenderer[Any]


def renderer_of(kind: type[Renderer], **fields: object) -> Renderer:
    given = {"prompt": "p", "messages": [{"role": "user", "content": "p"}], "n": 2, **fields}
    body = kind.body_model.parse(given)
    renderer = kind(body, addressed(body, "id"))
    if isinstance(renderer, CompletionRenderer) and fields.get("echo"):
        renderer.echoes = [str(given["prompt"])]
    return renderer


def whole(kind: type[Renderer], **fields: object) -> Json:
    renderer = renderer_of(kind, **fields)
    for event in EVENTS:
        renderer.collect(event)
    answer: Json = json.loads(renderer.whole())
    return answer


def chunks(kind: type[Renderer], **fields: object) -> list[Json]:
    renderer = renderer_of(kind, stream=True, **fields)
    sent = b"".join(renderer.chunk(event) for event in EVENTS) + renderer.ending()
    *events, done, rest = sent.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def check(content: object, name: str) -> None:
    """Holds a content against the OpenAPI document."""
    jsonschema.validate(content, {**document(), "$ref": f"#/components/schemas/{name}"})


def test_a_chat_is_rendered_whole() -> None:
    answer = whole(ChatRenderer)
    check(answer, "ChatAnswer")
    assert answer["choices"] == [
        {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": reason,
        }
        for index, text, reason in ((0, "ab", "stop"), (1, "x", "length"))
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_a_chat_is_rendered_in_chunks() -> None:
    rendered = chunks(ChatRenderer)
    for chunk in rendered:
        check(chunk, "ChatChunk")
        assert "usage" not in chunk
    choices = [chunk["choices"][0] for chunk in rendered]  # type: ignore[index]
    assert [(item["index"], item["delta"], item["finish_reason"]) for item in choices] == [
        (0, {"role": "assistant", "content": "a"}, None),
        (1, {"role": "assistant", "content": "x"}, None),
        (0, {"content": "b"}, None),
        (0, {}, "stop"),
        (1, {}, "length"),
    ]


def test_usage_comes_in_a_last_chunk_of_its_own() -> None:
    *others, last = chunks(ChatRenderer, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 7  # type: ignore[index]
    check(last, "ChatChunk")


def test_a_completion_is_rendered_whole_and_in_chunks() -> None:
    answer = whole(CompletionRenderer)
    check(answer, "CompletionAnswer")
    assert [item["text"] for item in answer["choices"]] == ["ab", "x"]  # type: ignore[attr-defined]
    for chunk in chunks(CompletionRenderer):
        check(chunk, "CompletionAnswer")


@pytest.mark.parametrize("kind", [ChatRenderer, CompletionRenderer])
def test_token_ids_come_with_the_choices_where_asked_for(kind: type[Renderer]) -> None:
    answer, name = whole(kind, return_token_ids=True), kind.__name__.removesuffix("Renderer")
    check(answer, f"{name}Answer")
    expected = {0: [1, 3], 1: [9, 2]}
    assert {item["index"]: item["token_ids"] for item in answer["choices"]} == expected  # type: ignore[attr-defined]
    ids: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks(kind, return_token_ids=True):
        check(chunk, "ChatChunk" if kind is ChatRenderer else "CompletionAnswer")
        (choice,) = chunk["choices"]  # type: ignore[misc]
        ids[choice["index"]] += choice["token_ids"]
    assert ids == expected
    assert "token_ids" not in json.dumps(whole(kind)) + json.dumps(chunks(kind))


def test_an_echo_is_in_front_of_every_answer_once() -> None:
    answer = whole(CompletionRenderer, echo=True)
    assert [item["text"] for item in answer["choices"]] == ["pab", "px"]  # type: ignore[attr-defined]
    texts = {0: "", 1: ""}
    for chunk in chunks(CompletionRenderer, echo=True):
        (choice,) = chunk["choices"]  # type: ignore[misc]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "pab", 1: "px"}


def score(text: str, logprob: float) -> TokenScore:
    return TokenScore(5, text.encode(), logprob)


HALF = TokenScore(7, "é".encode()[:1], -3.0)
SCORED = [
    AnswerDelta("a", [1], 0, (ScoredToken(score("a", -0.5), (score("a", -0.5), HALF)),)),
    AnswerDelta("", [2], 0, (ScoredToken(score("bc", -4.0), (score("d", -0.25),)),)),
    finished(0, 2),
]


def test_a_chat_returns_logprobs() -> None:
    renderer = renderer_of(ChatRenderer, n=1, logprobs=True, top_logprobs=2)
    for event in SCORED:
        renderer.collect(event)
    answer = json.loads(renderer.whole())
    check(answer, "ChatAnswer")
    first, second = answer["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("a", -0.5, [97])
    assert first["top_logprobs"][1] == {"token": "\ufffd", "logprob": -3.0, "bytes": [0xC3]}
    assert (second["token"], [item["token"] for item in second["top_logprobs"]]) == ("bc", ["d"])
    streamed = renderer_of(ChatRenderer, n=1, stream=True, logprobs=True, top_logprobs=2)
    chunks = [json.loads(streamed.chunk(event)[len("data: ") :]) for event in SCORED]
    for chunk in chunks:
        check(chunk, "ChatChunk")
    # Text may lag behind the tokens; their probabilities do not.
    contents = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [len(item["content"]) if item else None for item in contents] == [1, 1, None]


def test_a_completion_returns_logprobs() -> None:
    renderer = renderer_of(CompletionRenderer, n=1, logprobs=2)
    for event in SCORED:
        renderer.collect(event)
    answer = json.loads(renderer.whole())
    check(answer, "CompletionAnswer")
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["a", "bc"],
        "token_logprobs": [-0.5, -4.0],
        "top_logprobs": [{"a": -0.5, "\ufffd": -3.0}, {"d": -0.25, "bc": -4.0}],
        "text_offset": [0, 1],
    }
    streamed = renderer_of(CompletionRenderer, n=1, stream=True, logprobs=2)
    chunks = [json.loads(streamed.chunk(event)[len("data: ") :]) for event in SCORED[:2]]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1]]


CALLED = [
    AnswerDelta("", [1], 0, reasoning="Hm"),
    AnswerDelta("", [2], 0, reasoning="."),
    AnswerDelta("", [3], 0, tool_calls=(ToolCallDelta(0, "c1", "f"),)),
    AnswerDelta(
        "",
        [4],
        0,
        tool_calls=(ToolCallDelta(0, arguments="{"),),
    ),
    AnswerDelta(
        "",
        [4],
        0,
        tool_calls=(ToolCallDelta(0, arguments="}"),),
    ),
    AnswerDelta(
        "",
        [5],
        0,
        tool_calls=(ToolCallDelta(1, "c2", "g", "{}"),),
    ),
    finished(0, 5, pb.FINISH_REASON_TOOL_CALLS),
]


def test_reasoning_and_tool_calls_are_rendered_whole() -> None:
    renderer = renderer_of(ChatRenderer, n=1)
    for event in CALLED:
        renderer.collect(event)
    answer = json.loads(renderer.whole())
    check(answer, "ChatAnswer")
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


def test_reasoning_and_tool_calls_are_rendered_in_chunks() -> None:
    renderer = renderer_of(ChatRenderer, n=1, stream=True)
    chunks = [json.loads(renderer.chunk(event)[len("data: ") :]) for event in CALLED]
    for chunk in chunks:
        check(chunk, "ChatChunk")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": None, "reasoning_content": "Hm"}
    assert deltas[2]["tool_calls"] == [
        {
            "index": 0,
            "id": "c1",
            "type": "function",
            "function": {"name": "f", "arguments": ""},
        }
    ]
    assert deltas[4]["tool_calls"] == [{"index": 0, "function": {"arguments": "}"}}]
    assert deltas[-1] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_an_answer_without_text_has_a_role_all_the_same() -> None:
    renderer = renderer_of(ChatRenderer, stream=True, n=1)
    chunk = json.loads(renderer.chunk(finished(0, 1)).decode().removeprefix("data: "))
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidRequest("m", field="n"), 400, "invalid_request_error", "invalid_request"),
        (NotServed("m", field="n"), 400, "invalid_request_error", "unsupported_parameter"),
        (PromptTooLong("m", field="n"), 400, "invalid_request_error", "context_length_exceeded"),
        (UnknownModel("m", field="n"), 404, "invalid_request_error", "model_not_found"),
        (Exhausted("m", field="n"), 429, "requests", "rate_limit_exceeded"),
        (SlowReader("m", field="n"), 429, "requests", "slow_reader"),
        (Unavailable("m", field="n"), 503, "server_error", "unavailable"),
        (DeadlineExceeded("m", field="n"), 504, "server_error", "deadline_exceeded"),
    ],
)
def test_an_error_has_the_apis_shape(error: BatonError, status: int, kind: str, code: str) -> None:
    response = error_response(error, "id")
    body = json.loads(response.body)
    check(body, "ErrorBody")
    assert response.status_code == status
    assert body == {"error": {"message": "m", "type": kind, "param": "n", "code": code}}


@pytest.mark.parametrize(
    "error",
    [
        Internal(SECRET),
        PoisonRequest(SECRET),
        WorkerLost(SECRET),
        LayoutMismatch(SECRET),
        RuntimeError(SECRET),
    ],
)
def test_internal_details_are_not_returned(error: Exception) -> None:
    response = error_response(error, "id")
    assert response.status_code in (500, 503)
    text = bytes(response.body).decode()
    assert not set(SECRET.split()) & set(text.split())
    assert "home" not in text


def test_param_names_the_prompt_as_the_endpoint_does() -> None:
    error = InvalidRequest("the prompt is empty", field="prompt")
    body = json.loads(error_response(error, "id", "messages").body)
    assert body["error"]["param"] == "messages"


def test_retry_after_is_in_whole_seconds() -> None:
    response = error_response(Exhausted("m", retry_after=1.2), "id")
    assert response.headers["retry-after"] == "2"


def scored(text: str, logprob: float | None) -> ScoredToken:
    score = TokenScore(len(text), text.encode(), logprob)
    return ScoredToken(score, () if logprob is None else (TokenScore(7, b"seven", -0.5),))


ECHOED: list[AnswerEvent] = [
    started(2),
    # The prompt's first token is no part of its text.
    AnswerDelta(
        "a",
        [1],
        0,
        (scored("a", -2.0),),
        prompt_logprobs=(
            scored("<s>", None),
            scored("p", -1),
        ),
    ),
    AnswerDelta("b", [3], 0, (scored("b", -3.0),)),
    finished(0, 2),
]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_the_prompts_logprobs_before_the_answers(stream: bool) -> None:
    fields = {"n": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 1, "stream": stream}
    renderer = renderer_of(CompletionRenderer, **fields)
    if stream:
        sent = [renderer.chunk(event) for event in ECHOED]
        answers = [json.loads(each.removeprefix(b"data: ")) for each in sent if each]
    else:
        for event in ECHOED:
            renderer.collect(event)
        answers = [json.loads(renderer.whole())]
    for answer in answers:
        check(answer, "CompletionAnswer")
    choices = [answer["choices"][0] for answer in answers]
    assert "".join(choice["text"] for choice in choices) == "pab"
    scores = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [text for each in scores for text in each["tokens"]] == ["<s>", "p", "a", "b"]
    assert [number for each in scores for number in each["token_logprobs"]] == [None, -1, -2, -3]
    assert [place for each in scores for place in each["text_offset"]] == [0, 0, 1, 2]
    assert scores[0]["top_logprobs"][:2] == [None, {"seven": -0.5, "p": -1}]
    assert choices[0]["prompt_logprobs"] == [
        None,
        {
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": "seven"},
            "1": {"logprob": -1, "rank": None, "decoded_token": "p"},
        },
    ]


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(0, 1), (1, 0)])
def test_an_echo_and_the_prompts_scores_have_their_own_numbers_of_alternatives(
    logprobs: int, prompt_logprobs: int
) -> None:
    fields = {"echo": True, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    renderer = renderer_of(CompletionRenderer, n=1, **fields)
    for event in ECHOED:
        renderer.collect(event)
    (choice,) = json.loads(renderer.whole())["choices"]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 1 + logprobs
    assert len(choice["prompt_logprobs"][1]) == 1 + prompt_logprobs
    (asked,) = CompletionRequest.parse({"prompt": "x", **fields}).requests("id", NO_DEFAULTS)
    assert asked.prompt_logprobs == 1


def in_bytes(text: str) -> tuple[ScoredToken, ...]:
    """Scored tokens: one an ASCII character, and one a byte of any other."""
    return tuple(ScoredToken(TokenScore(1, bytes([byte]), -1.0), ()) for byte in text.encode())


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_characters_that_span_tokens_once(stream: bool, echo: bool) -> None:
    fields = {"prompt": "日p", "n": 1, "echo": echo, "logprobs": 0, "stream": stream}
    renderer = renderer_of(CompletionRenderer, **fields)
    scores = in_bytes("a🌟🌟b")
    events = [AnswerDelta(each.chosen.text, [1], 0, (each,)) for each in scores]
    events[0].prompt_logprobs = in_bytes("日p") if echo else ()
    if stream:
        sent = [json.loads(renderer.chunk(event).removeprefix(b"data: ")) for event in events]
    else:
        for event in [*events, finished(0, len(scores))]:
            renderer.collect(event)
        sent = [json.loads(renderer.whole())]
    offsets = [at for each in sent for at in each["choices"][0]["logprobs"]["text_offset"]]
    answer = [0, 1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert offsets == ([0, 0, 0, 1, *(2 + at for at in answer)] if echo else answer)

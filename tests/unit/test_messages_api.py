"""The Anthropic API's bodies, answers and errors."""

from __future__ import annotations

import json

import jsonschema
import pytest
from openapi_document import document

from baton.core.errors import (
    BatonError,
    DeadlineExceeded,
    Exhausted,
    Internal,
    InvalidRequest,
    NotServed,
    PromptTooLong,
    RateLimited,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from baton.core.generation_defaults import NO_DEFAULTS
from baton.core.proto_json import Json
from baton.core.types import ChatPrompt, Message, Request, Structure, Tool, ToolCall
from baton.router.answers.answer_events import AnswerDelta, AnswerEvent, ToolCallDelta
from baton.router.edges.http.http_errors import error_response
from baton.router.edges.http.messages.messages_renderer import MessagesRenderer
from baton.router.edges.http.messages.messages_request import CountTokensRequest, MessagesRequest
from baton.v1 import inference_pb2 as pb
from tests.support.http_bodies import addressed

HELLO: Json = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
USER = Message("user", "Hello")


def request(**fields: object) -> Request:
    (only,) = MessagesRequest.parse({**HELLO, **fields}).requests("id", NO_DEFAULTS)
    return only


def chat(**fields: object) -> ChatPrompt:
    prompt = request(**fields).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt == CountTokensRequest.parse({**HELLO, **fields}).chat_prompt()
    return prompt


def text(*texts: str) -> list[Json]:
    return [
        {"type": "text", "text": each, "cache_control": {"type": "ephemeral"}} for each in texts
    ]


def test_fields_become_those_of_a_request() -> None:
    made = request(
        temperature=0.5, top_k=3, stop_sequences=["a"], seed=1, metadata={"user_id": "x"}
    )
    assert (made.max_tokens, made.stop, made.n) == (9, ("a",), 1)
    assert (made.sampling.temperature, made.sampling.top_k) == (0.5, 3)
    form = {"type": "json_schema", "schema": {"const": 1}}
    wanted = Structure("json_schema", '{"const": 1}')
    assert request(output_config={"format": form}).structure == wanted
    assert request(output_format=form).structure == wanted


FIVE_MINUTES = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0),
        ({"system": text("Be brief.")}, 300),
        ({"cache_control": HOUR}, 3600),
        ({"tools": [{"name": "f", "input_schema": {}, "cache_control": HOUR}]}, 3600),
        ({"system": [{"type": "text", "text": "a", "cache_control": None}]}, 0),
        (
            {
                "system": text("Be brief."),
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "Hi", "cache_control": HOUR}],
                    },
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]},
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "1",
                                "content": "b",
                                "cache_control": FIVE_MINUTES,
                            }
                        ],
                    },
                ],
            },
            3600,
        ),
        ({"cache_hint": {"ttl": 7}}, 7),
    ],
)
def test_a_mark_for_the_cache_retains_the_prompt(fields: Json, seconds: int) -> None:
    assert request(**fields).retain_seconds == seconds


@pytest.mark.parametrize("mark", [{"type": "forever"}, {"type": "ephemeral", "ttl": "2h"}, "1h"])
def test_a_mark_of_another_kind_is_refused(mark: object) -> None:
    with pytest.raises(InvalidRequest, match="cache_control"):
        request(system=[{"type": "text", "text": "a", "cache_control": mark}])


@pytest.mark.parametrize(
    ("system", "messages"),
    [
        ("Be brief.", (Message("system", "Be brief."), USER)),
        (text("Be", "brief."), (Message("system", "Be\nbrief."), USER)),
        (
            text("x-anthropic-billing-header: cc_version=1; cch=abc;", "Be brief."),
            (Message("system", "Be brief."), USER),
        ),
        (text("x-anthropic-billing-header: cch=abc;"), (USER,)),
        ("", (USER,)),
    ],
)
def test_a_system_prompt_is_text_or_blocks(system: object, messages: tuple[Message, ...]) -> None:
    assert chat(system=system).messages == messages


def test_tools_results_and_thoughts_become_messages() -> None:
    called = {"type": "tool_use", "id": "c1", "name": "rain", "input": {"city": "Paris"}}
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": text("heavy", "rain")},
        {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
    ]
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    messages = [
        {"role": "user", "content": text("a", "b")},
        {"role": "assistant", "content": [thought, *text("I look."), called]},
        {"role": "user", "content": [*results, *text("So?")]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
        {"role": "user", "content": "Yes?"},
    ]
    assert chat(messages=messages) == ChatPrompt(
        (
            Message("user", "a\nb"),
            Message(
                "assistant",
                "I look.",
                (ToolCall("c1", "rain", '{"city": "Paris"}'),),
                reasoning="Hm.",
            ),
            Message("tool", "heavy\nrain", tool_call_id="c1", name="rain"),
            Message("tool", "", tool_call_id="c2"),
            Message("user", "So?"),
            Message("user", "Yes?"),
        )
    )


def test_an_answer_that_has_begun_is_continued() -> None:
    begun = {"role": "assistant", "content": "The capital"}
    assert chat(messages=[*HELLO["messages"], begun]).end == "continued"  # type: ignore[misc]


RAIN: Json = {"name": "rain", "description": "Tells.", "input_schema": {"properties": {}}}
TOOL = Tool("rain", "Tells.", '{"type": "object", "properties": {}}')


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ((TOOL,), False, ())),
        ({"type": "auto", "disable_parallel_tool_use": True}, ((TOOL,), False, ())),
        ({"type": "none"}, ((), False, ())),
        ({"type": "any"}, ((TOOL,), True, ())),
        ({"type": "tool", "name": "rain"}, ((TOOL,), True, ("rain",))),
    ],
)
def test_tools_are_parsed_with_their_choice(choice: object, expected: object) -> None:
    prompt = chat(tools=[RAIN], tool_choice=choice)
    assert (prompt.tools, prompt.must_call, prompt.allowed_tools) == expected


@pytest.mark.parametrize(
    ("given", "kwargs"),
    [
        ({}, {}),
        ({"thinking": {"type": "adaptive"}}, {}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
            {"enable_thinking": True, "thinking": True},
        ),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        (
            {"output_config": {"effort": "low"}},
            {"reasoning_effort": "low", "enable_thinking": True, "thinking": True},
        ),
    ],
)
def test_thinking_reaches_the_template(given: Json, kwargs: Json) -> None:
    assert json.loads(chat(**given).template_kwargs) == kwargs


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://x"}}
WRONG: list[tuple[Json, str, type[BatonError]]] = [
    ({"max_tokens": None}, "max_tokens", InvalidRequest),
    ({"max_tokens": 0}, "max_tokens", InvalidRequest),
    ({"messages": []}, "messages", InvalidRequest),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", InvalidRequest),
    (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages[0].content[0].type",
        NotServed,
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}],
                }
            ]
        },
        "messages[0].content[0].content[0].type",
        NotServed,
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c"}]}]},
        "messages[0].content[0].name",
        InvalidRequest,
    ),
    ({"system": [IMAGE]}, "system", NotServed),
    ({"tools": [{"type": "web_search_20250305", "name": "web"}]}, "tools", NotServed),
    ({"tools": [{"name": "rain"}]}, "tools[0].input_schema", InvalidRequest),
    ({"tools": [{"name": "no name", "input_schema": {}}]}, "tools", InvalidRequest),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools", InvalidRequest),
    ({"tools": [RAIN, RAIN]}, "tools", InvalidRequest),
    ({"tool_choice": {"type": "any"}}, "tool_choice", InvalidRequest),
    (
        {"tools": [RAIN], "tool_choice": {"type": "tool", "name": "sun"}},
        "tool_choice",
        InvalidRequest,
    ),
    ({"mcp_servers": [{}]}, "mcp_servers", NotServed),
    ({"n": 2}, "n", NotServed),
    ({"stop": ["a"]}, "stop", NotServed),
    ({"logprobs": True}, "logprobs", NotServed),
    ({"regex": "a"}, "regex", NotServed),
    ({"response_format": {"type": "json_object"}}, "response_format", NotServed),
    ({"max_completion_tokens": 3}, "max_completion_tokens", NotServed),
    ({"thread": {"type": "create"}}, "thread", NotServed),
    ({"stop_sequences": [""]}, "stop_sequences[0]", InvalidRequest),
]


@pytest.mark.parametrize(("given", "field", "error"), WRONG)
def test_a_wrong_field_is_refused_by_name(given: Json, field: str, error: type[BatonError]) -> None:
    with pytest.raises(error) as refused:
        request(**given)
    assert refused.value.field == field


STARTED = pb.Started(request_id="id", prompt_tokens=7)


def finished(reason: pb.FinishReason.ValueType, stop: str = "") -> pb.Finished:
    usage = pb.Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=4)
    return pb.Finished(finish_reason=reason, usage=usage, stop=stop)


CALLED: list[AnswerEvent] = [
    STARTED,
    AnswerDelta("", [1], reasoning="Hm"),
    AnswerDelta("I", [2], reasoning="."),
    AnswerDelta(" look.", [3]),
    AnswerDelta("", [4], tool_calls=(ToolCallDelta(0, "c1", "rain"),)),
    AnswerDelta("", [5], tool_calls=(ToolCallDelta(0, arguments='{"city":'),)),
    AnswerDelta(
        "",
        [6],
        tool_calls=(ToolCallDelta(0, arguments='"é"}'), ToolCallDelta(1, "c2", "sun", "{}")),
    ),
    finished(pb.FINISH_REASON_TOOL_CALLS),
]
USAGE = {
    "input_tokens": 3,
    "output_tokens": 5,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 4,
}


def renderer(**fields: object) -> MessagesRenderer:
    body = MessagesRequest.parse({**HELLO, **fields})
    return MessagesRenderer(body, addressed(body, "msg_1"))


def whole(events: list[AnswerEvent]) -> Json:
    made = renderer()
    for event in events:
        made.collect(event)
    message: Json = json.loads(made.whole())
    check(message, "MessageAnswer")
    return message


def streamed(events: list[AnswerEvent]) -> list[Json]:
    made = renderer(stream=True)
    sent = b"".join(map(made.chunk, events)) + made.ending()
    found = []
    for each in sent.decode().removesuffix("\n\n").split("\n\n"):
        name, data = each.split("\n")
        content: Json = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        check(content, "MessageEvent")
        found.append(content)
    return found


def check(content: object, name: str) -> None:
    jsonschema.validate(content, {**document(), "$ref": f"#/components/schemas/{name}"})


def test_an_answer_is_a_message_of_blocks() -> None:
    assert whole(CALLED) == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "rain", "input": {"city": "é"}},
            {"type": "tool_use", "id": "c2", "name": "sun", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": USAGE,
    }


def test_a_stream_has_the_events_of_the_api_in_their_order() -> None:
    events = streamed(CALLED)
    start, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    assert [event["type"] for event in events] == [
        *("message_start", start, "ping", delta, delta, stop),
        *(start, delta, delta, stop),
        *(start, delta, delta, stop),
        *(start, delta, stop),
        *("message_delta", "message_stop"),
    ]
    assert [event["delta"] for event in events if event["type"] == delta] == [
        {"type": "thinking_delta", "thinking": "Hm"},
        {"type": "thinking_delta", "thinking": "."},
        {"type": "text_delta", "text": "I"},
        {"type": "text_delta", "text": " look."},
        {"type": "input_json_delta", "partial_json": '{"city":'},
        {"type": "input_json_delta", "partial_json": '"é"}'},
        {"type": "input_json_delta", "partial_json": "{}"},
    ]
    assert [event["index"] for event in events if event["type"] == stop] == [0, 1, 2, 3]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == USAGE
    assert events[0]["message"]["content"] == []  # type: ignore[call-overload, index]


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        (pb.FINISH_REASON_STOP, "", ("end_turn", None)),
        (pb.FINISH_REASON_STOP, "\n", ("stop_sequence", "\n")),
        (pb.FINISH_REASON_LENGTH, "", ("max_tokens", None)),
    ],
)
def test_stop_reasons(
    reason: pb.FinishReason.ValueType, stop: str, expected: tuple[str, str | None]
) -> None:
    events: list[AnswerEvent] = [STARTED, AnswerDelta("x", [1]), finished(reason, stop)]
    message, last = whole(events), streamed(events)[-2]["delta"]
    assert isinstance(last, dict)
    for found in (message, last):
        assert (found["stop_reason"], found["stop_sequence"]) == expected


def test_arguments_that_were_cut_off_are_left_out() -> None:
    call = AnswerDelta("", [4], tool_calls=(ToolCallDelta(0, "c1", "rain", '{"city": "P'),))
    (block,) = whole([STARTED, call, finished(pb.FINISH_REASON_LENGTH)])["content"]  # type: ignore[misc]
    assert block == {"type": "tool_use", "id": "c1", "name": "rain", "input": {}}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("x"), 400, "invalid_request_error"),
        (PromptTooLong("x"), 400, "invalid_request_error"),
        (Unauthenticated("x"), 401, "authentication_error"),
        (UnknownModel("x"), 404, "not_found_error"),
        (RateLimited("x", retry_after=2), 429, "rate_limit_error"),
        (Exhausted("x", retry_after=2), 529, "overloaded_error"),
        (Unavailable("x"), 529, "overloaded_error"),
        (DeadlineExceeded("x"), 504, "timeout_error"),
        (Internal("secret"), 500, "api_error"),
    ],
)
def test_errors_have_the_apis_shape(error: BatonError, status: int, kind: str) -> None:
    response = error_response(error, "id", "messages", "/v1/messages/count_tokens")
    body = json.loads(bytes(response.body))
    check(body, "MessagesErrorBody")
    assert (response.status_code, body["error"]["type"]) == (status, kind)
    assert body["request_id"] == response.headers["request-id"] == "id"
    assert "secret" not in body["error"]["message"]
    assert (response.headers.get("retry-after") == "2") == bool(error.retry_after)


def test_a_refused_thread_tells_sdks_to_send_the_whole_conversation() -> None:
    with pytest.raises(NotServed) as refused:
        request(thread={"type": "continue", "previous_message_id": "msg_1"})
    body = json.loads(bytes(error_response(refused.value, "id", "messages", "/v1/messages").body))
    check(body, "MessagesErrorBody")
    assert body["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }

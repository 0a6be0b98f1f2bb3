"""Prompts of HTTP bodies: messages, texts, tokens and tools."""

from __future__ import annotations

import json

import pytest
from http_bodies import HELLO, chat, completion, request

from baton.core.errors import InvalidRequest
from baton.core.proto_json import Json
from baton.core.types import (
    ChatPrompt,
    Message,
    Prompt,
    Tool,
    ToolCall,
)
from baton.router.edges.http.chat_request import TokenizeRequest


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"role": "system", "content": "a"}, Message("system", "a")),
        ({"role": "developer", "content": "a"}, Message("system", "a")),
        ({"role": "assistant", "content": "", "tool_calls": []}, Message("assistant", "")),
        (
            {"role": "user", "name": "x", "content": [{"type": "text", "text": "a"}] * 2},
            Message("user", "a\na"),
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "a"}]},
            Message("assistant", "a"),
        ),
        ({"role": "assistant", "content": None, "refusal": "a"}, Message("assistant", "a")),
        ({"role": "assistant", "content": "a", "refusal": None}, Message("assistant", "a")),
    ],
)
def test_a_message_is_parsed(message: Json, read: Message) -> None:
    assert request(chat(messages=[message])).prompt == ChatPrompt((read,))


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "king", "content": "hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "\udc00"}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "x", "content": [{"type": "refusal"}]}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "refusal"}]}], "messages[0].content[0].refusal"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "function", "content": "x"}], "messages[0]"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].id"),
    ],
)
def test_wrong_messages_are_refused_by_place(messages: object, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(messages=messages)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        (["a", [3]], ["a", (3,)]),
    ],
)
def test_a_completion_has_prompts_of_many_kinds(prompt: object, read: list[Prompt]) -> None:
    assert [request.prompt for request in completion(prompt=prompt)] == read


@pytest.mark.parametrize(
    "prompt", [None, [], 5, {"a": 1}, [1, "a"], ["a", 1], [[1.5]], [-1], [True], ["a"] * 129]
)
def test_other_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        completion(prompt=prompt)
    assert refused.value.field == "prompt"


def test_prompts_times_answers_are_bounded() -> None:
    with pytest.raises(InvalidRequest, match="at most 128"):
        completion(prompt=["a"] * 9, n=16)


def test_tokenize_takes_a_chat_or_a_text() -> None:
    assert tokenized(HELLO) == ChatPrompt((Message("user", "Hello"),))
    assert tokenized({"prompt": "Hello"}) == "Hello"
    for wrong in ({}, {"prompt": [1]}, {"prompt": "x", "add_special_tokens": 1}):
        with pytest.raises(InvalidRequest):
            tokenized(wrong)


def tokenized(body: Json) -> Prompt:
    return TokenizeRequest.parse(body).to_prompt()


WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells it.",
        "parameters": {"properties": {"city": {"type": "string"}}},
    },
}
PARAMETERS = '{"type": "object", "properties": {"city": {"type": "string"}}}'


def allowed(mode: str, *names: str) -> Json:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TOOL = Tool("get_weather", "Tells it.", PARAMETERS)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ((TOOL,), False, ())),
        ("none", ((), False, ())),
        ("auto", ((TOOL,), False, ())),
        ("required", ((TOOL,), True, ())),
        (
            {"type": "function", "function": {"name": "get_weather"}},
            ((TOOL,), True, ("get_weather",)),
        ),
        (allowed("auto", "get_weather"), ((TOOL,), False, ("get_weather",))),
        (allowed("required", "get_weather"), ((TOOL,), True, ("get_weather",))),
    ],
)
def test_tools_are_parsed_with_their_choice(choice: object, expected: object) -> None:
    prompt = request(chat(tools=[WEATHER], tool_choice=choice)).prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.tools, prompt.must_call, prompt.allowed_tools) == expected


def test_tools_may_be_called_where_nothing_is_chosen() -> None:
    prompt = request(chat(tools=[WEATHER, {"type": "function", "function": {"name": "b"}}])).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == (TOOL, Tool("b", "", '{"type": "object"}'))


def typed(kind: object) -> Json:
    return {"type": "function", "function": {"name": "b", "parameters": {"type": kind}}}


@pytest.mark.parametrize("kind", ["object", ["object", "null"]])
def test_parameters_are_an_object(kind: object) -> None:
    prompt = request(chat(tools=[typed(kind)], tool_choice="required")).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == (Tool("b", "", '{"type": "object"}'),)


@pytest.mark.parametrize(
    "given",
    [
        {"tools": "x"},
        {"tools": [5]},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]},
        {"tools": [typed("array")], "tool_choice": "required"},
        {"tools": [typed(["string", "null"])]},
        {"tools": [typed(None)]},
        {"tools": [WEATHER, WEATHER]},
        {"tools": [WEATHER], "tool_choice": "always"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "b"}}},
        {"tools": [WEATHER], "tool_choice": allowed("auto", "b")},
        {"tools": [WEATHER], "tool_choice": allowed("auto", "")},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": ""}}},
        {"tools": [WEATHER], "tool_choice": allowed("none", "get_weather")},
        {"tools": [WEATHER], "tool_choice": allowed("auto")},
        {"tool_choice": "required"},
    ],
)
def test_invalid_tools_are_refused(given: Json) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**given)
    assert refused.value.field.startswith("tool")


def test_calls_and_their_results_are_messages() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "f"},
    ]
    assert request(chat(messages=messages)).prompt == ChatPrompt(
        (
            Message("assistant", "", (ToolCall("c1", "f", "{}"),), reasoning="Hm."),
            Message("tool", "sunny", tool_call_id="c1", name="f"),
        )
    )


def test_tokenize_includes_tools() -> None:
    prompt = tokenized({**HELLO, "tools": [WEATHER]})
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == (TOOL,)


@pytest.mark.parametrize(
    ("given", "kwargs", "end"),
    [
        ({}, {}, "open"),
        ({"add_generation_prompt": True}, {}, "open"),
        ({"add_generation_prompt": False}, {}, "closed"),
        ({"continue_final_message": True}, {}, "continued"),
        ({"continue_final_message": True, "add_generation_prompt": False}, {}, "continued"),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "a": [1]}},
            {"enable_thinking": False, "a": [1]},
            "open",
        ),
        (
            {"reasoning_effort": "none"},
            {"reasoning_effort": "none", "enable_thinking": False, "thinking": False},
            "open",
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": 7}},
            {"reasoning_effort": "low", "enable_thinking": True, "thinking": 7},
            "open",
        ),
    ],
)
def test_the_template_sees_what_a_caller_sets(given: Json, kwargs: Json, end: str) -> None:
    for prompt in (request(chat(**given)).prompt, tokenized({**HELLO, **given})):
        assert isinstance(prompt, ChatPrompt)
        assert (json.loads(prompt.template_kwargs), prompt.end) == (kwargs, end)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_what_a_template_cannot_take_is_refused(given: Json, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**given)
    assert refused.value.field == field

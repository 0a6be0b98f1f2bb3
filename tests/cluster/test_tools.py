"""Tools as users offer them, on the embedded model's first layers, which would call none by
themselves."""

from __future__ import annotations

import json

import openai
import pytest
from processes import ProcessCluster

from baton import FinishReason, Message, Tool

MODEL = "shallow"
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
DAYS = {
    "type": "object",
    "properties": {"days": {"enum": [1, 2, 3]}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": DAYS}},
    {"type": "function", "function": {"name": "get_news", "parameters": DAYS}},
]
NEWS = {"type": "function", "function": {"name": "get_news"}}


@pytest.mark.parametrize("choice", ["required", NEWS])
def test_a_call_that_must_be_made_is_made(shallow_sdk: openai.OpenAI, choice: object) -> None:
    options = {"model": MODEL, "messages": ASKED, "tools": TOOLS, "tool_choice": choice}
    answer = shallow_sdk.chat.completions.create(temperature=1, seed=1, **options)  # type: ignore[call-overload]
    for item in answer.choices:
        assert (item.finish_reason, item.message.content) == ("tool_calls", None)
        (call,) = item.message.tool_calls
        assert call.function.name in (
            {"get_news"} if choice == NEWS else {"get_weather", "get_news"}
        )
        assert json.loads(call.function.arguments)["days"] in (1, 2, 3)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_with_a_schema_an_answer_calls_a_tool_or_keeps_to_it(
    shallow_sdk: openai.OpenAI, choice: str
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "days", "schema": DAYS}}
    answer = shallow_sdk.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL,
        messages=ASKED,
        tools=TOOLS,
        tool_choice=choice,
        response_format=form,
        temperature=1,
        seed=1,
        n=4,
    )
    for item in answer.choices:
        calls = [call.function.arguments for call in item.message.tool_calls or ()]
        (said,) = calls or [item.message.content]
        assert json.loads(said)["days"] in (1, 2, 3)
        assert item.finish_reason == ("tool_calls" if calls else "stop")
        assert calls or choice == "auto"


def test_a_streamed_call_joins_to_the_whole(shallow_sdk: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": ASKED, "tools": TOOLS, "tool_choice": NEWS}
    with shallow_sdk.chat.completions.stream(temperature=0, **options) as stream:  # type: ignore[call-overload]
        pieces = [event for event in stream if event.type.endswith("arguments.delta")]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    whole = shallow_sdk.chat.completions.create(temperature=0, **options)  # type: ignore[call-overload]
    assert len(pieces) > 3
    assert call.function.arguments == whole.choices[0].message.tool_calls[0].function.arguments


def test_a_result_goes_back_and_the_model_may_say_what_it_likes(shallow_sdk: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_news", "arguments": "{}"}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "It rains."},
    ]
    answer = shallow_sdk.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        tools=TOOLS,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=12,
    )
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def test_grpc_has_them_too(shallow_idle: ProcessCluster) -> None:
    tool = Tool("get_weather", "Tells the weather.", json.dumps(DAYS))
    with shallow_idle.client() as client:
        answer = client.chat(
            [Message("user", "Weather?")], tools=[tool], tool_choice="get_weather", max_tokens=90
        )
    (call,) = answer.tool_calls
    assert (call.name, answer.text) == ("get_weather", "")
    assert json.loads(call.arguments)["days"] in (1, 2, 3)
    assert answer.finish_reason is FinishReason.TOOL_CALLS

"""/v1/responses with the OpenAI SDK, on a real cluster."""

from __future__ import annotations

import json

import openai
import pytest
from pydantic import BaseModel, Field

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
DAYS = {
    "type": "object",
    "properties": {"days": {"enum": [1, 2, 3]}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "name": name, "parameters": DAYS, "strict": True} for name in ("a", "b")
]


class City(BaseModel):
    name: str = Field(max_length=20)
    large: bool


def test_a_question_is_answered_and_kept(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(model=MODEL, input=QUESTION, temperature=0)
    assert (response.output_text, response.status) == (ANSWER, "completed")
    assert response.usage is not None
    assert response.usage.output_tokens == 8
    kept = sdk.responses.retrieve(response.id)
    assert kept.output_text == ANSWER
    sdk.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        sdk.responses.retrieve(response.id)


def test_an_answer_streams(sdk: openai.OpenAI) -> None:
    with sdk.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        response = stream.get_final_response()
    assert len(deltas) > 3
    assert "".join(deltas) == response.output_text == ANSWER


def test_a_conversation_goes_on(sdk: openai.OpenAI) -> None:
    first = sdk.responses.create(model=MODEL, input=QUESTION, temperature=0)
    second = sdk.responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=first.id, temperature=0
    )
    turns = [("user", QUESTION), ("assistant", ANSWER), ("user", "And of Italy?")]
    items = [{"role": role, "content": text} for role, text in turns]
    alone = sdk.responses.create(model=MODEL, input=items, temperature=0, store=False)  # type: ignore[arg-type]
    assert second.output_text == alone.output_text
    assert second.usage is not None
    assert alone.usage is not None
    assert second.usage.input_tokens == alone.usage.input_tokens
    listed = [*sdk.responses.input_items.list(second.id, limit=2, order="asc")]  # two pages
    assert [(each.role, each.content[0].text) for each in listed] == turns  # type: ignore[union-attr]
    assert listed[1].id == first.output[0].id
    for unknown in (alone.id, "resp_x"):
        with pytest.raises(openai.NotFoundError) as refused:
            sdk.responses.create(model=MODEL, input="?", previous_response_id=unknown)
        assert refused.value.param == "previous_response_id"


def test_the_tokens_of_a_prompt_are_counted(sdk: openai.OpenAI) -> None:
    first = sdk.responses.create(model=MODEL, input=QUESTION, temperature=0)
    assert first.usage is not None
    counted = sdk.responses.input_tokens.count(model=MODEL, input=QUESTION)
    assert counted.input_tokens == first.usage.input_tokens
    asked = {"input": "And of Italy?", "previous_response_id": first.id, "instructions": "Hm."}
    second = sdk.responses.create(model=MODEL, max_output_tokens=1, **asked)  # type: ignore[call-overload]
    counted = sdk.responses.input_tokens.count(model=MODEL, **asked)  # type: ignore[arg-type]
    assert counted.input_tokens == second.usage.input_tokens


def test_a_function_is_called_and_its_output_goes_back(sdk: openai.OpenAI) -> None:
    choice = {"type": "function", "name": "b"}
    with sdk.responses.stream(  # type: ignore[call-overload]
        model=MODEL, input=QUESTION, tools=TOOLS, tool_choice=choice, temperature=0
    ) as stream:
        pieces = [event for event in stream if event.type.endswith("arguments.delta")]
        response = stream.get_final_response()
    assert len(pieces) > 3
    (call,) = response.output
    assert (call.type, call.name) == ("function_call", "b")
    assert json.loads(call.arguments)["days"] in (1, 2, 3)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    after = sdk.responses.create(  # type: ignore[call-overload]
        model=MODEL, input=[output], previous_response_id=response.id, temperature=0
    )
    assert after.output_text


def test_an_answer_keeps_to_a_model_of_pydantics(sdk: openai.OpenAI) -> None:
    parsed = sdk.responses.parse(
        model=MODEL, input="Tell me about Paris.", text_format=City, temperature=0
    )
    assert isinstance(parsed.output_parsed, City)


def test_a_response_is_cancelled_by_another_call(sdk: openai.OpenAI) -> None:
    stream = sdk.responses.create(
        model=MODEL, input="Count to a thousand.", stream=True, extra_body={"ignore_eos": True}
    )
    created = next(stream)
    assert created.type == "response.created"
    running = sdk.responses.retrieve(created.response.id)
    assert running.status == "in_progress"
    assert sdk.responses.cancel(created.response.id).status == "cancelled"
    *_, last = stream
    assert last.type == "response.incomplete"
    assert last.response.status == "cancelled"
    assert sdk.responses.retrieve(created.response.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="has ended"):
        sdk.responses.cancel(created.response.id)


def test_a_limit_makes_an_answer_incomplete(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=2)
    assert (response.status, response.output_text) == ("incomplete", "The capital")

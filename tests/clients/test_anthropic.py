"""The Anthropic SDK against a real cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator

import anthropic
import pytest
from processes import ProcessCluster
from pydantic import BaseModel, Field

from baton.core.model_store import EMBEDDED_NAME

ASKED = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
DAYS = {
    "type": "object",
    "properties": {"days": {"enum": [1, 2, 3]}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOLS = [{"name": name, "description": "Tells.", "input_schema": DAYS} for name in ("rain", "sun")]


class City(BaseModel):
    name: str = Field(max_length=20)
    inhabitants: int


@pytest.fixture
def sdk(cluster: ProcessCluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=f"http://{cluster.http}", api_key="none", max_retries=0
    ) as client:
        yield client


# The SDK has no field for sampling any more.
GREEDY = {"model": EMBEDDED_NAME, "max_tokens": 40, "extra_body": {"temperature": 0}}


def test_a_question_is_answered(sdk: anthropic.Anthropic) -> None:
    message = sdk.messages.create(messages=ASKED, **GREEDY)
    (block,) = message.content
    assert (block.type, block.text) == ("text", ANSWER)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    counted = sdk.messages.count_tokens(model=EMBEDDED_NAME, messages=ASKED)
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    assert usage.output_tokens == 8


def test_the_models_are_listed(sdk: anthropic.Anthropic) -> None:
    (model,) = sdk.models.list()
    assert (model.id, model.type, model.display_name) == (EMBEDDED_NAME, "model", EMBEDDED_NAME)
    assert model.created_at.timestamp() <= time.time()
    assert sdk.models.retrieve(EMBEDDED_NAME).id == EMBEDDED_NAME


def test_an_answer_streams(sdk: anthropic.Anthropic) -> None:
    with sdk.messages.stream(messages=ASKED, **GREEDY) as stream:
        pieces = list(stream.text_stream)
    assert len(pieces) > 3
    assert "".join(pieces) == ANSWER
    message = stream.get_final_message()
    assert message.content[0].text == ANSWER
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 8)


async def test_the_async_sdk_streams_too(cluster: ProcessCluster) -> None:
    address = f"http://{cluster.http}"
    async with (
        anthropic.AsyncAnthropic(base_url=address, api_key="none") as client,
        client.messages.stream(messages=ASKED, **GREEDY) as stream,
    ):
        text = "".join([piece async for piece in stream.text_stream])
    assert text == ANSWER


def test_a_stop_sequence_and_a_limit_end_an_answer(sdk: anthropic.Anthropic) -> None:
    message = sdk.messages.create(messages=ASKED, stop_sequences=[" France"], **GREEDY)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " France")
    assert message.content[0].text == "The capital of"
    short = sdk.messages.create(messages=ASKED, **{**GREEDY, "max_tokens": 2})
    assert (short.stop_reason, short.content[0].text) == ("max_tokens", "The capital")


def test_an_answer_that_has_begun_goes_on(sdk: anthropic.Anthropic) -> None:
    begun = {"role": "assistant", "content": "The capital of France"}
    assert sdk.messages.create(messages=[*ASKED, begun], **GREEDY).content[0].text == " is Paris."


def test_a_tool_is_called_and_its_result_goes_back(sdk: anthropic.Anthropic) -> None:
    options = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "sun"}, **GREEDY}
    with sdk.messages.stream(messages=ASKED, **options) as stream:
        partial = [event for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert len(partial) > 3
    (call,) = message.content
    assert (call.type, call.name, message.stop_reason) == ("tool_use", "sun", "tool_use")
    assert call.input["days"] in (1, 2, 3)
    whole = sdk.messages.create(messages=ASKED, **options)
    assert whole.content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It shines."}
    turns = [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    after = sdk.messages.create(messages=[*ASKED, *turns], tools=TOOLS, **GREEDY)
    assert after.content[0].type == "text"


def test_an_answer_keeps_to_a_model_of_pydantics(sdk: anthropic.Anthropic) -> None:
    parsed = sdk.messages.parse(messages=ASKED, output_format=City, **{**GREEDY, "max_tokens": 200})
    assert isinstance(parsed.parsed_output, City)


def test_errors_are_the_sdks_own(sdk: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        sdk.messages.create(messages=ASKED, model="another", max_tokens=1)
    assert unknown.value.body["error"]["type"] == "not_found_error"
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"content\[0\]\.type .* \"image\"|image"):
        sdk.messages.create(messages=[{"role": "user", "content": [image]}], **GREEDY)

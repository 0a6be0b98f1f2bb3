"""The bodies of /v1/responses, its answers, and those that are stored."""

from __future__ import annotations

import json

import jsonschema
import pytest
from openai.types.responses import ResponseItem
from openapi_document import document
from pydantic import TypeAdapter

from baton.core.errors import (
    BatonError,
    InvalidRequest,
    NotServed,
    Unavailable,
    UnknownRequest,
)
from baton.core.generation_defaults import NO_DEFAULTS
from baton.core.proto_json import Json
from baton.core.types import ChatPrompt, Message, Request, Structure, Tool, ToolCall
from baton.router.answers.answer_events import AnswerDelta, AnswerEvent, ToolCallDelta
from baton.router.edges.client_buffer import ClientBuffer
from baton.router.edges.http.chat_request import ChatRequest
from baton.router.edges.http.http_errors import error_response
from baton.router.edges.http.responses.input_items import listed_item
from baton.router.edges.http.responses.responses_endpoint import ResponseStore, StoredResponse
from baton.router.edges.http.responses.responses_renderer import Items, ResponsesRenderer
from baton.router.edges.http.responses.responses_request import MessageItem, ResponsesRequest
from baton.router.prompts.output_grammar import ANY_OBJECT
from baton.v1 import inference_pb2 as pb
from tests.support.http_bodies import addressed

USER = Message("user", "Hello")


def request(**fields: object) -> Request:
    (only,) = ResponsesRequest.parse({"input": "Hello", **fields}).requests("id", NO_DEFAULTS)
    return only


def chat(**fields: object) -> ChatPrompt:
    prompt = request(**fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_fields_become_those_of_a_request() -> None:
    made = request(max_output_tokens=7, temperature=0.5, top_p=0.9, include=[], user="x")
    assert (made.max_tokens, made.sampling.temperature, made.sampling.top_p) == (7, 0.5, 0.9)
    assert chat(instructions="Be brief.").messages == (Message("system", "Be brief."), USER)
    kwargs = json.loads(chat(reasoning={"effort": "low", "summary": "auto"}).template_kwargs)
    assert kwargs["reasoning_effort"] == "low"


@pytest.mark.parametrize(
    ("form", "structure"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, ANY_OBJECT),
        (
            {"type": "json_schema", "name": "x", "schema": {"const": 1}, "strict": True},
            Structure("json_schema", '{"const": 1}'),
        ),
    ],
)
def test_a_text_has_a_format(form: Json, structure: Structure | None) -> None:
    assert request(text={"format": form}).structure == structure


def test_items_become_messages() -> None:
    part = {"type": "output_text", "text": "I look.", "annotations": []}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [
            {"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "m", "role": "assistant", "content": [part], "status": "x"},
        {"type": "function_call", "call_id": "c1", "name": "rain", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "sun", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "heavy"},
        {"type": "function_call_output", "call_id": "c2", "output": [
            {"type": "input_text", "text": "none"}]},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "Thanks."},
    ]  # fmt: skip
    calls = ToolCall("c1", "rain", "{}"), ToolCall("c2", "sun", "{}")
    assert chat(input=items).messages == (
        Message("system", "Be brief."),
        Message("user", "Rain?"),
        Message("assistant", "I look.", calls, reasoning="Hm."),
        Message("tool", "heavy", tool_call_id="c1", name="rain"),
        Message("tool", "none", tool_call_id="c2", name="sun"),
        Message("assistant", "It rains."),
        Message("user", "Thanks."),
    )


def test_a_refusal_is_what_the_assistant_said() -> None:
    said = [{"type": "output_text", "text": "Hm."}, {"type": "refusal", "refusal": "No."}]
    items = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": said}]
    assert chat(input=items).messages == (USER, Message("assistant", "Hm.\nNo."))
    with pytest.raises(InvalidRequest, match=r"input\[0\]\.content\[0\]\.refusal is missing"):
        request(input=[{"role": "assistant", "content": [{"type": "refusal", "text": "No."}]}])


RAIN: Json = {"type": "function", "name": "rain", "parameters": {"properties": {}}, "strict": True}
TOOL = Tool("rain", "", '{"type": "object", "properties": {}}')
NAMED: Json = {"type": "function", "name": "rain"}


def test_functions_of_a_namespace_are_offered_and_a_search_is_not() -> None:
    agents = {"type": "namespace", "name": "agents", "tools": [RAIN]}
    body = ResponsesRequest.parse(
        {"input": "Hello", "tools": [agents, {"type": "web_search", "external_web_access": False}]}
    )
    assert body.chat_prompt().tools == chat(tools=[RAIN]).tools
    assert body.namespaces == {RAIN["name"]: "agents"}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ((TOOL,), False, ())),
        ("none", ((), False, ())),
        ("required", ((TOOL,), True, ())),
        (NAMED, ((TOOL,), True, ("rain",))),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]},
            ((TOOL,), False, ("rain",)),
        ),
    ],
)
def test_tools_are_parsed_with_their_choice(choice: object, expected: object) -> None:
    prompt = chat(tools=[RAIN], tool_choice=choice)
    assert (prompt.tools, prompt.must_call, prompt.allowed_tools) == expected


@pytest.mark.parametrize(
    ("given", "field", "error"),
    [
        ({"input": None}, "input", InvalidRequest),
        ({"input": []}, "input", InvalidRequest),
        ({"input": 5}, "input", InvalidRequest),
        ({"input": [{"role": "king", "content": ""}]}, "input[0].role", InvalidRequest),
        ({"input": [{"type": "computer_call"}]}, "input", NotServed),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            NotServed,
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", InvalidRequest),
        ({"tools": [{"type": "file_search"}]}, "tools", NotServed),
        ({"tools": [{**RAIN, "parameters": {"type": "string"}}]}, "tools", InvalidRequest),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tool_choice",
            InvalidRequest,
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "x"}]}]},
            "tools",
            NotServed,
        ),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", InvalidRequest),
        ({"tool_choice": "required"}, "tool_choice", InvalidRequest),
        ({"text": {"format": {"type": "grammar"}}}, "text", NotServed),
        ({"background": True}, "background", NotServed),
        ({"conversation": "c"}, "conversation", NotServed),
        ({"prompt": {"id": "p"}}, "prompt", NotServed),
        ({"text": {"verbosity": "low"}}, "text.verbosity", NotServed),
        ({"n": 2}, "n", NotServed),
        ({"stop": "x"}, "stop", NotServed),
        ({"max_tokens": 5}, "max_tokens", NotServed),
        ({"regex": "a"}, "regex", NotServed),
        ({"grammar": "start: A"}, "grammar", NotServed),
        ({"guided_json": {}}, "guided_json", NotServed),
        ({"guided_choice": ["a"]}, "guided_choice", NotServed),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", NotServed),
        ({"response_format": {"type": "json_object"}}, "response_format", NotServed),
        ({"logprobs": True}, "logprobs", NotServed),
        ({"reasoning_effort": "low"}, "reasoning_effort", NotServed),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", NotServed),
        ({"truncation": "auto"}, "truncation", NotServed),
        ({"max_output_tokens": 0}, "max_output_tokens", InvalidRequest),
    ],
)
def test_a_wrong_field_is_refused_by_name(given: Json, field: str, error: type[BatonError]) -> None:
    with pytest.raises(error) as refused:
        request(**given)
    assert refused.value.field == field
    body = json.loads(error_response(refused.value, "id", "input", "/v1/responses").body)
    assert body["error"]["param"] == field


def test_every_field_of_a_chat_is_taken_or_refused() -> None:
    names = {*ChatRequest.model_fields, *ChatRequest.unserved}
    unknown = names - {*ResponsesRequest.model_fields, *ResponsesRequest.unserved}
    assert unknown == {"messages", "user", "stream_options", "prediction"}


def test_fields_of_a_chat_without_an_effect_pass() -> None:
    harmless = {"n": 1, "stop": [], "regex": "", "grammar": None, "logprobs": False}
    form = {"type": "text"}
    assert request(seed=1, response_format=form, **harmless) == request(seed=1)


STARTED = pb.Started(request_id="id", prompt_tokens=7)


def finished(reason: pb.FinishReason.ValueType = pb.FINISH_REASON_STOP) -> pb.Finished:
    usage = pb.Usage(prompt_tokens=7, completion_tokens=6, cached_tokens=4)
    return pb.Finished(finish_reason=reason, usage=usage)


CALLED: list[AnswerEvent] = [
    STARTED,
    AnswerDelta("", [1, 2], reasoning="Hm."),
    AnswerDelta("I", [3]),
    AnswerDelta(" look.", [4]),
    AnswerDelta("", [5], tool_calls=(ToolCallDelta(0, "c1", "rain"),)),
    AnswerDelta("", [6], tool_calls=(ToolCallDelta(0, arguments='{"city":"é"}'),)),
    finished(pb.FINISH_REASON_TOOL_CALLS),
]


def renderer(history: Items | None = None, **fields: object) -> ResponsesRenderer:
    body = ResponsesRequest.parse({"input": "Hello", **fields})
    return ResponsesRenderer(body, addressed(body, "id"), history)


def whole(events: list[AnswerEvent], made: ResponsesRenderer | None = None) -> Json:
    made = made or renderer()
    for event in events:
        made.collect(event)
    return checked(made.whole())


def checked(body: bytes) -> Json:
    response: Json = json.loads(body)
    check(response, "ResponseAnswer")
    return response


def streamed(sent: bytes) -> list[Json]:
    found = []
    for number, each in enumerate(sent.decode().removesuffix("\n\n").split("\n\n")):
        name, data = each.split("\n")
        content: Json = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        assert content["sequence_number"] == number
        check(content, "ResponseEvent")
        found.append(content)
    return found


def check(content: object, name: str) -> None:
    jsonschema.validate(content, {**document(), "$ref": f"#/components/schemas/{name}"})


def test_an_answer_is_a_response_of_items() -> None:
    response = whole(CALLED)
    reasoning, message, call = response["output"]  # type: ignore[misc]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    part = {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    assert (message["role"], message["content"]) == ("assistant", [part])
    assert (call["call_id"], call["name"], call["arguments"]) == ("c1", "rain", '{"city":"é"}')
    assert {item["status"] for item in (reasoning, message, call)} == {"completed"}
    assert (response["status"], response["error"]) == ("completed", None)
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 13,
    }


def test_a_call_names_the_namespace_of_its_function() -> None:
    agents = {"type": "namespace", "name": "agents", "tools": [RAIN]}
    response = whole(CALLED, renderer(tools=[agents, {"type": "web_search"}]))
    assert response["output"][2]["namespace"] == "agents"  # type: ignore[index]
    assert [tool["type"] for tool in response["tools"]] == ["namespace", "web_search"]  # type: ignore[union-attr]


def test_a_stream_has_the_events_of_the_api_in_their_order() -> None:
    made = renderer(stream=True)
    events = streamed(b"".join(map(made.chunk, CALLED)) + made.ending())
    assert [str(event["type"]).removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"] == whole(CALLED) | {
        "id": made.id,
        "created_at": made.created,
        "output": items,
    }


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    events: list[AnswerEvent] = [STARTED, AnswerDelta("x", [1]), finished(pb.FINISH_REASON_LENGTH)]
    response = whole(events)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = response["output"]  # type: ignore[misc]
    assert (response["status"], item["status"]) == ("incomplete", "incomplete")
    made = renderer(stream=True)
    sent = streamed(b"".join(map(made.chunk, events)) + made.ending())
    assert sent[-1]["type"] == "response.incomplete"


def test_an_error_within_a_stream_is_a_failed_response() -> None:
    made = renderer(stream=True)
    begun = b"".join(map(made.chunk, [STARTED, AnswerDelta("x", [1])]))
    error = error_response(Unavailable("gone"), "id", "input", "/v1/responses")
    last = streamed(begun + made.failure(bytes(error.body)))[-1]
    assert last["type"] == "response.failed"
    response = last["response"]
    assert isinstance(response, dict)
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")


def test_a_stored_response_is_followed_by_its_owner() -> None:
    store, made = ResponseStore(), renderer(instructions="Be brief.")
    store.run("me", made)
    assert json.loads(store.body("me", made.id))["status"] == "in_progress"
    body = whole(CALLED, made)
    assert json.loads(store.body("me", made.id)) == body
    said = Message("assistant", "I look.", (ToolCall("c1", "rain", '{"city":"é"}'),), "", "", "Hm.")
    follower = ResponsesRequest.parse(
        {"input": [{"type": "function_call_output", "call_id": "c1", "output": "heavy"}]}
    )
    assert follower.chat_prompt(store.conversation("me", made.id).values()).messages == (
        USER,
        said,
        Message("tool", "heavy", tool_call_id="c1", name="rain"),
    )
    with pytest.raises(UnknownRequest) as refused:
        store.conversation("you", made.id)
    assert refused.value.field == "previous_response_id"
    with pytest.raises(InvalidRequest, match="has ended"):
        store.cancel("me", made.id)
    store.delete("me", made.id)
    for use in (store.body, store.delete, store.cancel):
        with pytest.raises(UnknownRequest):
            use("me", made.id)


def test_a_reference_stands_for_an_item_of_a_stored_response() -> None:
    store, made = ResponseStore(), renderer()
    store.run("me", made)
    output = whole(CALLED, made)["output"]
    references = [{"type": "item_reference", "id": item["id"]} for item in output]  # type: ignore[index, union-attr]

    def messages(owner: str, *items: Json) -> tuple[Message, ...]:
        body = ResponsesRequest.parse({"input": [*items]})
        return body.resolved(lambda name: store.item(owner, name)).chat_prompt().messages

    hello, again = ({"role": "user", "content": text} for text in ("Hello", "Again"))
    before = ResponsesRequest.parse({"input": [again]}).chat_prompt(
        store.conversation("me", made.id).values()
    )
    assert messages("me", hello, *references, again) == before.messages
    (asked,) = store.inputs("me", made.id)
    asked_again = {"type": "item_reference", "id": asked}
    assert messages("me", asked_again, *references, again) == before.messages
    for name in ("", "msg_1", made.id, f"{references[0]['id']}0"):
        with pytest.raises(UnknownRequest) as refused:
            messages("me", {"type": "item_reference", "id": name})
        assert refused.value.field == "input"
    with pytest.raises(UnknownRequest):
        messages("you", references[0])
    with pytest.raises(InvalidRequest, match="twice"):
        messages("me", *references, references[0])


def test_the_items_that_a_response_was_made_from_are_listed() -> None:
    """With those of the responses before it, as the API's types have them."""
    parts = [{"type": "text", "text": "Paris"}, {"type": "refusal", "refusal": "No."}]
    given: list[Json] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": parts},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "rain", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "heavy"},
        {"type": "function_call_output", "call_id": "c1", "output": [parts[0]]},
    ]
    store, first = ResponseStore(), renderer(input=given)
    store.run("me", first)
    running = store.inputs("me", first.id)
    whole(CALLED, first)
    assert store.inputs("me", first.id) == running
    second = renderer(store.conversation("me", first.id))
    found = [listed_item(*each) for each in second.inputs.items()]
    for item in found:
        check(item, "ListedItem")
        TypeAdapter(ResponseItem).validate_python(item, strict=True)
    assert len({item["id"] for item in found}) == len(found) == 6 + 3 + 1
    assert found[1]["content"] == [
        {"type": "output_text", "text": "Paris", "annotations": [], "logprobs": []},
        {"type": "refusal", "refusal": "No."},
    ]
    assert [found[place]["output"] for place in (4, 5)] == [
        "heavy",
        [{"type": "input_text", "text": "Paris"}],
    ]
    for owner, name in (("you", first.id), ("me", "resp_1")):
        with pytest.raises(UnknownRequest):
            store.inputs(owner, name)


async def test_a_running_response_is_cancelled() -> None:
    store, made, events = ResponseStore(), renderer(), ClientBuffer(10)
    store.run("me", made)
    made.began(events)
    for event in (STARTED, AnswerDelta("x", [1])):
        made.collect(event)
    cancelled = checked(store.cancel("me", made.id))
    assert cancelled["status"] == "cancelled"
    assert [event async for event in events] == []  # it is closed
    assert checked(made.whole()) == cancelled == json.loads(store.body("me", made.id))


def test_a_response_that_nobody_waits_for_any_more_is_forgotten() -> None:
    store, made = ResponseStore(), renderer()
    store.run("me", made)
    identity = made.id
    del made
    with pytest.raises(UnknownRequest):
        store.body("me", identity)


def test_the_store_is_bounded_and_drops_what_was_not_used_for_longest() -> None:
    said = MessageItem(role="user", content="y" * 1000)
    response = StoredResponse(b"x" * 1000, {"msg_1": said})
    assert response.size > StoredResponse(b"x" * 1000).size + 999
    store = ResponseStore(limit=3 * response.size)
    for name in "abc":
        store.keep("", name, response)
    store.body("", "a")
    store.keep("", "d", response)
    with pytest.raises(UnknownRequest):
        store.body("", "b")
    for name in "acd":
        assert store.body("", name) == response.body
    huge = StoredResponse(b"x" * 10_000)
    store.keep("", "e", huge)
    with pytest.raises(UnknownRequest):
        store.body("", "e")
    store.keep("", "f", response)
    assert store.body("", "f") == response.body

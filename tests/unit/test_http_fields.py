"""Fields of HTTP bodies."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from http_bodies import HELLO, chat, completion, request
from jsonschema import Draft202012Validator
from openapi_document import document

from baton.core.errors import BatonError, InvalidRequest, InvalidSampling, NotServed
from baton.core.proto_json import Json
from baton.core.types import (
    ChatPrompt,
    Message,
    Request,
    Sampling,
    Structure,
)
from baton.router.edges.http.chat_request import ChatRequest
from baton.router.edges.http.completion_request import CompletionRequest
from baton.router.prompts.output_grammar import ANY_OBJECT


def test_defaults_are_those_of_the_api() -> None:
    body = CompletionRequest.parse({"prompt": "Hello"})
    assert (body.stream, body.include_usage, body.echo, body.n) == (False, False, False, 1)
    plain = request(chat())
    assert plain == Request("id", ChatPrompt((Message("user", "Hello"),)), plain.sampling, None)
    assert plain.sampling == Sampling(temperature=1.0, seed=plain.sampling.seed)
    assert request(completion()).max_tokens == 16


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}),
        ("regex", "a"),
        ("grammar", "start: A"),
        ("guided_json", {"const": 1}),
        ("guided_regex", "a"),
        ("guided_choice", ["a"]),
        ("guided_grammar", "start: A"),
        ("structured_outputs.json", {"const": 1}),
        ("structured_outputs.choice", ["a"]),
    ],
)
def test_a_structure_knows_the_field_that_it_came_from(name: str, value: object) -> None:
    field, _, inner = name.partition(".")
    structure = request(chat(**{field: {inner: value} if inner else value})).structure
    assert structure is not None
    assert structure.given_as == name


def test_null_is_the_same_as_absent() -> None:
    names = ["temperature", "max_tokens", "n", "stop", "stream", "tools", "tool_choice", "logprobs"]
    plain, empty = chat(seed=1), chat(**dict.fromkeys(names), seed=1)
    assert plain == empty
    assert ChatRequest.parse({**HELLO, "stream": None}).stream is False


def test_a_seed_is_drawn_anew_for_every_prompt() -> None:
    requests = completion(prompt=["same", "same"])
    first, second = (request.sampling.seed for request in requests)
    assert first != second


SAMPLING: list[tuple[Json, dict[str, Any]]] = [
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 2}, {"temperature": 2.0}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"top_p": 0}, {"top_k": 1}),
    ({"top_k": -1}, {}),
    ({"top_k": 5.0}, {"top_k": 5}),
    ({"min_p": 0.1}, {"min_p": 0.1}),
    ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
    ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
    ({"seed": -1}, {"seed": 2**64 - 1}),
    ({"seed": 0}, {"seed": 0}),
    ({"logit_bias": {"7": -100, "5": 1.5}}, {"logit_bias": ((5, 1.5), (7, -100.0))}),
    ({"logit_bias": {}}, {}),
    ({"min_tokens": 5}, {"min_tokens": 5}),
    ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
    ({"suppress_tokens": [3, 4]}, {"suppress_tokens": (3, 4)}),
    ({"begin_suppress_tokens": []}, {}),
    ({"bad_words_ids": [[3], [4, 5.0]]}, {"bad_words_ids": ((3,), (4, 5))}),
]


@pytest.mark.parametrize(("given", "changed"), SAMPLING)
def test_sampling_is_parsed(given: Json, changed: dict[str, float]) -> None:
    expected = dataclasses.replace(Sampling(temperature=1.0, seed=7), **changed)  # type: ignore[arg-type]
    assert request(chat(**{"seed": 7, **given})).sampling == expected


OTHER: list[tuple[Json, dict[str, Any]]] = [
    ({"max_tokens": 5}, {"max_tokens": 5}),
    ({"max_completion_tokens": 6}, {"max_tokens": 6}),
    ({"max_tokens": 5, "max_completion_tokens": 6}, {"max_tokens": 6}),
    ({"stop": "a"}, {"stop": ("a",)}),
    ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
    ({"stop": []}, {}),
    ({"stop_token_ids": [3, 3, 4]}, {"stop_token_ids": frozenset({3, 4})}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"n": 16}, {"n": 16}),
    ({"cache_salt": "mine"}, {"cache_salt": "mine"}),
    ({"cache_hint": {"ttl": 300}}, {"retain_seconds": 300}),
    ({"cache_hint": {"ttl": "1h"}}, {"retain_seconds": 3600}),
    ({"cache_hint": {"ttl": 0}}, {}),
    ({"cache_hint": None}, {}),
    ({"prompt_cache_retention": "24h"}, {"retain_seconds": 86400}),
    ({"prompt_cache_retention": "in_memory"}, {}),
    ({"cache_hint": {"ttl": 9}, "prompt_cache_retention": "24h"}, {"retain_seconds": 9}),
    ({"priority": -3}, {"priority": -3}),
    ({"service_tier": "auto"}, {}),
    ({"service_tier": "priority"}, {"priority": -100}),
    ({"service_tier": "flex"}, {"priority": 100}),
    ({"service_tier": "batch"}, {"priority": 1000}),
    ({"service_tier": "flex", "priority": 0}, {}),
    ({"user": "someone", "no_such_field": {"a": 1}, "metadata": {}, "store": True}, {}),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, {}),
    ({"response_format": {"type": "text"}, "logit_bias": {}, "logprobs": False}, {}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"response_format": {"type": "json_object"}}, {"structure": ANY_OBJECT}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}},
        {"structure": Structure("json_schema", '{"const": 1}')},
    ),
    ({"regex": "a+"}, {"structure": Structure("regex", "a+")}),
    ({"grammar": 'start: "a"'}, {"structure": Structure("lark", 'start: "a"')}),
    ({"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
    ({"guided_json": {"const": 1}}, {"structure": Structure("json_schema", '{"const": 1}')}),
    ({"guided_json": '{"const": 1}'}, {"structure": Structure("json_schema", '{"const": 1}')}),
    ({"guided_regex": "a+"}, {"structure": Structure("regex", "a+")}),
    ({"guided_grammar": 'start: "a"'}, {"structure": Structure("lark", 'start: "a"')}),
    ({"guided_choice": ["a", '"']}, {"structure": Structure("lark", 'start: "a" | "\\""')}),
    (
        {"structured_outputs": {"json": {"const": 1}}},
        {"structure": Structure("json_schema", '{"const": 1}')},
    ),
    ({"structured_outputs": {"regex": "a+"}}, {"structure": Structure("regex", "a+")}),
    ({"structured_outputs": {"json_object": True}}, {"structure": ANY_OBJECT}),
    ({"structured_outputs": {}}, {}),
    ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    ({"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": -1}),
    ({"prediction": {"type": "content", "content": "a\nb"}}, {"prediction": "a\nb"}),
    (
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "a"}] * 2}},
        {"prediction": "a\na"},
    ),
    ({"prediction": None}, {}),
]


@pytest.mark.parametrize(("given", "changed"), OTHER)
def test_other_fields_are_parsed(given: Json, changed: Json) -> None:
    assert request(chat(seed=1, **given)) == dataclasses.replace(request(chat(seed=1)), **changed)  # type: ignore[arg-type]


def test_a_ttl_beyond_a_day_is_refused_however_it_is_written() -> None:
    for ttl in (86401, "2d"):
        with pytest.raises(InvalidRequest, match="at most 86400"):
            chat(cache_hint={"ttl": ttl})


WRONG: list[tuple[Json, str, type[BatonError]]] = [
    ({"temperature": 2.1}, "temperature", InvalidSampling),
    ({"temperature": -0.1}, "temperature", InvalidSampling),
    ({"temperature": "1"}, "temperature", InvalidRequest),
    ({"temperature": True}, "temperature", InvalidRequest),
    ({"temperature": float("inf")}, "temperature", InvalidSampling),
    ({"temperature": float("nan")}, "temperature", InvalidSampling),
    ({"temperature": 10**400}, "temperature", InvalidSampling),
    ({"temperature": [1]}, "temperature", InvalidRequest),
    ({"top_p": 1.1}, "top_p", InvalidSampling),
    ({"top_k": -2}, "top_k", InvalidRequest),
    ({"top_k": 1.5}, "top_k", InvalidRequest),
    ({"min_p": 2}, "min_p", InvalidSampling),
    ({"repetition_penalty": 0}, "repetition_penalty", InvalidSampling),
    ({"presence_penalty": 2.1}, "presence_penalty", InvalidSampling),
    ({"frequency_penalty": -2.1}, "frequency_penalty", InvalidSampling),
    ({"seed": 2**64}, "seed", InvalidRequest),
    ({"seed": "7"}, "seed", InvalidRequest),
    ({"seed": float("inf")}, "seed", InvalidRequest),
    ({"n": 0}, "n", InvalidRequest),
    ({"n": 17}, "n", InvalidRequest),
    ({"max_tokens": -1}, "max_tokens", InvalidRequest),
    ({"max_completion_tokens": -5}, "max_completion_tokens", InvalidRequest),
    ({"stop": ["a"] * 17}, "stop", InvalidRequest),
    ({"stop": ""}, "stop", InvalidRequest),
    ({"stop": [1]}, "stop", InvalidRequest),
    ({"stop": 1}, "stop", InvalidRequest),
    ({"stop": "a" * 1025}, "stop", InvalidRequest),
    ({"stop_token_ids": [-1]}, "stop_token_ids", InvalidRequest),
    ({"stop_token_ids": [2**32]}, "stop_token_ids", InvalidRequest),
    ({"stop_token_ids": 5}, "stop_token_ids", InvalidRequest),
    ({"ignore_eos": 1}, "ignore_eos", InvalidRequest),
    ({"stream": "yes"}, "stream", InvalidRequest),
    ({"stream_options": {"include_usage": True}}, "stream_options", InvalidRequest),
    ({"stream": True, "stream_options": []}, "stream_options", InvalidRequest),
    ({"cache_salt": "a" * 257}, "cache_salt", InvalidRequest),
    ({"cache_hint": {}}, "cache_hint.ttl", InvalidRequest),
    ({"cache_hint": 5}, "cache_hint", InvalidRequest),
    ({"cache_hint": {"ttl": -1}}, "cache_hint.ttl", InvalidRequest),
    ({"cache_hint": {"ttl": 86401}}, "cache_hint.ttl", InvalidRequest),
    ({"cache_hint": {"ttl": "soon"}}, "cache_hint.ttl", InvalidRequest),
    ({"priority": 1001}, "priority", InvalidRequest),
    ({"service_tier": "gold"}, "service_tier", InvalidRequest),
    ({"cache_salt": "\ud800"}, "cache_salt", InvalidRequest),
    ({"user": 5}, "user", InvalidRequest),
    ({"logit_bias": {"5": 101}}, "logit_bias", InvalidSampling),
    ({"logit_bias": {"5": float("nan")}}, "logit_bias", InvalidSampling),
    ({"logit_bias": {"5": "1"}}, "logit_bias", InvalidRequest),
    ({"logit_bias": {"five": 1}}, "logit_bias", InvalidRequest),
    ({"logit_bias": {"-1": 1}}, "logit_bias", InvalidRequest),
    ({"logit_bias": [1]}, "logit_bias", InvalidRequest),
    ({"logit_bias": {str(token): 0 for token in range(1025)}}, "logit_bias", InvalidRequest),
    ({"response_format": {"type": "xml"}}, "response_format", NotServed),
    ({"response_format": "json_object"}, "response_format", InvalidRequest),
    ({"regex": 5}, "regex", InvalidRequest),
    ({"grammar": ["start"]}, "grammar", InvalidRequest),
    ({"guided_json": 5}, "guided_json", InvalidRequest),
    ({"guided_choice": []}, "guided_choice", InvalidRequest),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", InvalidRequest),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", InvalidRequest),
    ({"skip_special_tokens": 0}, "skip_special_tokens", InvalidRequest),
    ({"bad_words": ["x"]}, "bad_words", NotServed),
    ({"min_tokens": -1}, "min_tokens", InvalidRequest),
    ({"no_repeat_ngram_size": 65}, "no_repeat_ngram_size", InvalidRequest),
    ({"suppress_tokens": [-1]}, "suppress_tokens", InvalidRequest),
    ({"suppress_tokens": 5}, "suppress_tokens", InvalidRequest),
    ({"begin_suppress_tokens": ["a"]}, "begin_suppress_tokens", InvalidRequest),
    ({"bad_words_ids": [3]}, "bad_words_ids", InvalidRequest),
]


@pytest.mark.parametrize(("given", "field", "error"), WRONG)
@pytest.mark.parametrize("read", [chat, completion])
def test_a_wrong_field_is_refused_by_name(
    read: Callable[..., tuple[Request, ...]], given: Json, field: str, error: type[BatonError]
) -> None:
    with pytest.raises(error) as refused:
        read(**given)
    assert type(refused.value) is error
    assert refused.value.field == field
    assert field in refused.value.message


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        ("a", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": "a" * (2**17 + 1)}, "prediction.content"),
        ({"type": "tokens", "content": "a"}, "prediction"),  # as every unknown type
    ],
)
def test_a_wrong_prediction_is_refused_by_name(prediction: Json | str, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(prediction=prediction)
    assert refused.value.field == field


# Schemas know nothing of what is no JSON, or of two fields together.
SAYABLE = [
    given
    for given, field, _ in WRONG
    if field != "stream_options" and not re.search(r"NaN|Infinity|\\ud8", json.dumps(given))
]


@pytest.mark.parametrize("given", SAYABLE)
@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest"])
def test_the_document_says_what_is_refused(name: str, given: Json) -> None:
    validator = Draft202012Validator({**document(), "$ref": f"#/components/schemas/{name}"})
    good = {"prompt": "Hello", **HELLO}
    assert validator.is_valid(good)
    assert not validator.is_valid({**good, **given})


@pytest.mark.parametrize("given", [given for given, _ in SAMPLING + OTHER])
def test_the_document_allows_what_is_accepted(given: Json) -> None:
    validator = Draft202012Validator({**document(), "$ref": "#/components/schemas/ChatRequest"})
    assert validator.is_valid({**HELLO, **given})


def test_the_document_is_made_of_schemas() -> None:
    components = document()["components"]
    assert isinstance(components, dict)
    for schema in components["schemas"].values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tools": [{"type": "custom"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"chat_template": "x"}, "chat_template"),
    ],
)
def test_unserved_chat_fields_are_refused_by_name(given: Json, field: str) -> None:
    with pytest.raises(NotServed) as refused:
        chat(**given)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("given", "field"),
    [({"logprobs": 3}, "logprobs"), ({"top_logprobs": 3}, "top_logprobs")]
    + [({"logprobs": True, "top_logprobs": number}, "top_logprobs") for number in (-1, 21, "3")],
)
def test_a_chats_logprobs_are_a_flag_and_a_number(given: Json, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**given)
    assert refused.value.field == field


def test_a_completions_logprobs_are_a_number() -> None:
    assert [request(completion(logprobs=number)).logprobs for number in (None, 0, 5)] == [
        *(None, 0, 5)
    ]
    for wrong in ({"logprobs": True}, {"logprobs": 21}):
        with pytest.raises(InvalidRequest) as refused:
            completion(**wrong)
        assert refused.value.field == "logprobs"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"logprobs": 2}, None),
        ({"echo": True}, None),
        ({"logprobs": 2, "echo": True}, 2),
        ({"prompt_logprobs": 0}, 0),
        ({"logprobs": 2, "echo": True, "prompt_logprobs": 5}, 5),
    ],
)
def test_a_completion_has_logprobs_of_its_prompt(given: Json, wanted: int | None) -> None:
    assert request(completion(**given)).prompt_logprobs == wanted


def test_no_tokens_are_wanted_where_a_prompt_is_scored() -> None:
    for scores in ({"echo": True}, {"prompt_logprobs": 0}):
        assert request(completion(max_tokens=0, **scores)).max_tokens == 0
    for read in (chat, completion):
        with pytest.raises(InvalidRequest) as refused:
            read(max_tokens=0)
        assert refused.value.field == "max_tokens"


def test_a_chat_has_no_logprobs_of_its_prompt() -> None:
    with pytest.raises(NotServed, match="prompt_logprobs"):
        chat(prompt_logprobs=0)


@pytest.mark.parametrize(
    ("given", "field"), [({"best_of": 2}, "best_of"), ({"suffix": "x"}, "suffix")]
)
def test_unserved_completion_fields_are_refused_by_name(given: Json, field: str) -> None:
    with pytest.raises(NotServed) as refused:
        completion(**given)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
        {"response_format": {"type": "json_object"}, "regex": "a"},
        {"regex": "a", "grammar": "b"},
        {"regex": "a", "guided_choice": ["b"]},
        {"structured_outputs": {"regex": "a", "grammar": "b"}},
    ],
)
def test_an_invalid_structure_or_two_are_refused(given: Json) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**given)
    assert refused.value.field.startswith("response_format")


def test_include_usage_is_parsed() -> None:
    for options, wanted in (({"include_usage": True}, True), ({}, False)):
        body = ChatRequest.parse({**HELLO, "stream": True, "stream_options": options})
        assert body.include_usage is wanted

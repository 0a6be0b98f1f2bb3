"""Structured answers as users ask for them, on the embedded model and on its first layers."""

from __future__ import annotations

import json
import re
from typing import Literal

import openai
import pytest
from processes import ProcessCluster
from pydantic import BaseModel, Field

import baton
from baton.core.model_store import EMBEDDED_NAME

MODEL = "shallow"


class City(BaseModel):
    name: str = Field(max_length=20)
    country: Literal["France", "Italy", "Spain"]
    inhabitants: int = Field(ge=0, le=99_999_999)
    rivers: list[Literal["Seine", "Tiber", "Ebro"]] = Field(max_length=2)


ASKED = [{"role": "user", "content": "Tell me about Paris."}]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sdk_parses_answers_into_a_model_of_its_own(
    shallow_sdk: openai.OpenAI, temperature: float
) -> None:
    answer = shallow_sdk.chat.completions.parse(
        model=MODEL,
        messages=ASKED,  # type: ignore[arg-type]
        response_format=City,
        n=2,
        temperature=temperature,
        seed=1,
    )
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, City)
        assert choice.finish_reason == "stop"


def test_a_streamed_object_is_json_to_its_end(sdk: openai.OpenAI) -> None:
    """Of the whole model, which ends an object by itself."""
    chunks = sdk.chat.completions.create(
        model=EMBEDDED_NAME,
        messages=ASKED,  # type: ignore[arg-type]
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=200,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    pieces = [chunk.choices[0] for chunk in chunks]
    text = "".join(piece.delta.content or "" for piece in pieces)
    if pieces[-1].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert text.startswith("{")


def test_regular_expressions_and_grammars_are_fields_of_their_own(
    shallow_sdk: openai.OpenAI, shallow_idle: ProcessCluster
) -> None:
    body = {"regex": r"(yes|no)\.", "logprobs": 1}
    answer = shallow_sdk.completions.create(model=MODEL, prompt="Is it so?", extra_body=body)
    assert answer.choices[0].text in ("yes.", "no.")
    with shallow_idle.client() as client:
        lark = 'start: "Paris" | "London"'
        assert client.generate("A city:", grammar=lark).text in ("Paris", "London")
        told = client.generate("A date:", json_schema={"type": "string", "format": "date"}).text
        assert re.fullmatch(r'"\d{4}-\d\d-\d\d"', told)


def test_a_bad_structure_is_named(shallow_sdk: openai.OpenAI, shallow_idle: ProcessCluster) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
    with pytest.raises(openai.BadRequestError, match="strin") as refused:
        shallow_sdk.chat.completions.create(model=MODEL, messages=ASKED, response_format=bad)  # type: ignore[call-overload]
    assert (refused.value.param, refused.value.code) == ("response_format", "invalid_grammar")
    # A schema without an end, which only a worker finds.
    endless = {"guided_json": {"$ref": "#"}}
    with pytest.raises(openai.BadRequestError, match="allows no token") as refused:
        shallow_sdk.completions.create(model=MODEL, prompt="x", extra_body=endless)
    assert (refused.value.param, refused.value.code) == ("guided_json", "invalid_grammar")
    with shallow_idle.client() as client:
        with pytest.raises(baton.InvalidGrammar, match="unclosed"):
            client.generate("x", regex="(")
        with pytest.raises(baton.InvalidGrammar, match="no-such"):
            client.generate("x", grammar="start: <no-such>")

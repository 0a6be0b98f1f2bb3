"""The fields that say what an answer must match: the OpenAI API's, and the aliases of vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from baton.core import bounds
from baton.core.errors import InvalidRequest
from baton.core.types import Structure
from baton.router.edges.http.request_model import RequestModel, Unserved, about, invalid, shown
from baton.router.prompts.output_grammar import ANY_OBJECT, json_structure

MAX_CHOICE_TEXTS = 1024
"""Texts of which an answer is one."""

StructureText = Annotated[str, Field(max_length=bounds.MAX_STRUCTURE)]
ChoiceTexts = Annotated[
    list[StructureText], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICE_TEXTS)
]


def _schema_text(value: object) -> object:
    if isinstance(value, dict):
        return json.dumps(value)
    if not isinstance(value, str):
        raise invalid(f"must be a JSON Schema, not {shown(value)}")
    return value


SchemaText = Annotated[
    StructureText,
    BeforeValidator(_schema_text, json_schema_input_type=dict[str, object] | StructureText),
]


class JsonSchemaFormat(RequestModel):
    # Followed whether it is marked strict or not.
    json_schema: dict[str, object] | None = Field(None, alias="schema")


_FORMAT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "object", "properties": {"schema": {"type": ["object", "null"]}}},
        {"description": "Anything: ignored for other types."},
    ]
}


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchemaFormat | None, WithJsonSchema(_FORMAT_SCHEMA)] = Field(
        None, validate_default=True
    )

    @field_validator("json_schema", mode="wrap")
    @classmethod
    def _schema_of_its_type(cls, value: Any, validate: Any, info: ValidationInfo) -> Any:
        """Ignored for other types."""
        if info.data.get("type") != "json_schema":
            return None
        if value is None:
            raise invalid("must be an object, not null")
        return validate(value)

    @property
    def structure(self) -> Structure | None:
        schema = self.json_schema.json_schema if self.json_schema else None
        return None if self.type == "text" else json_structure(schema)


class StructuredOutputs(RequestModel):
    """As vLLM groups them."""

    json_schema: SchemaText = Field("", alias="json")
    regex: StructureText = ""
    choice: ChoiceTexts | None = None
    grammar: StructureText = ""
    json_object: bool = False

    unserved: ClassVar[dict[str, Unserved]] = {
        "structural_tag": Unserved("structures within an answer"),
        "whitespace_pattern": Unserved("a choice of white space"),
    }

    def structures(self) -> Iterator[Structure]:
        yield from _structures(self.json_schema, self.regex, self.choice, self.grammar)
        if self.json_object:
            yield ANY_OBJECT


class StructureFields(RequestModel):
    """At most one of them is set."""

    response_format: ResponseFormat | None = about("At most one structure is given.")
    regex: StructureText = about("The whole answer matches this regular expression.", "")
    grammar: StructureText = about("The answer follows this grammar, in llguidance's Lark.", "")
    guided_json: SchemaText = about("The answer is JSON of this JSON Schema.", "")
    guided_regex: StructureText = about("The same as regex.", "")
    guided_choice: ChoiceTexts | None = about("The answer is one of these texts.")
    guided_grammar: StructureText = about("The same as grammar.", "")
    structured_outputs: StructuredOutputs | None = about("The same in one object.")

    def structure(self) -> Structure | None:
        given = [
            *_structures("", self.regex, None, self.grammar),
            *_structures(
                self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
            ),
            *(self.structured_outputs.structures() if self.structured_outputs else ()),
        ]
        if self.response_format and (structure := self.response_format.structure):
            given.append(structure)
        if len(given) > 1:
            raise InvalidRequest(
                "at most one of response_format, regex, grammar, guided_json, guided_regex,"
                " guided_choice, guided_grammar and structured_outputs",
                field="response_format",
            )
        return given[0] if given else None


def _structures(
    schema: str, regex: str, choice: Sequence[str] | None, grammar: str
) -> Iterator[Structure]:
    if schema:
        yield Structure("json_schema", schema)
    if regex:
        yield Structure("regex", regex)
    if choice:
        yield Structure("lark", "start: " + " | ".join(map(json.dumps, choice)))
    if grammar:
        yield Structure("lark", grammar)

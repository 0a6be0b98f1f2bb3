"""What an answer is asked to read as: `response_format`, `regex` and `grammar`."""

from __future__ import annotations

import json

from baton.core.bounds import MAX_STRUCTURE
from baton.core.errors import InvalidRequest, NotServed
from baton.core.types import Structure
from baton.router.edges.http.fields import Field, Json, String, wrong_type
from baton.router.edges.http.schemas import object_of
from baton.router.prompts.output_grammar import ANY_OBJECT

REGEX = String("regex", "The answer is text that this matches from end to end.", MAX_STRUCTURE)
GRAMMAR = String(
    "grammar", "The answer is a sentence of this grammar, in llguidance's Lark.", MAX_STRUCTURE
)
READ: tuple[Field, ...] = (REGEX, GRAMMAR)


def read_structure(body: Json) -> Structure | None:
    found = [_read_format(body.get("response_format"))]
    if regex := REGEX.of(body):
        found.append(Structure("regex", regex))
    if grammar := GRAMMAR.of(body):
        found.append(Structure("lark", grammar))
    asked = [structure for structure in found if structure is not None]
    if len(asked) > 1:
        raise InvalidRequest(
            "at most one of response_format, regex and grammar", field="response_format"
        )
    return asked[0] if asked else None


def _read_format(form: object) -> Structure | None:
    if form is None:
        return None
    if not isinstance(form, dict):
        raise wrong_type("response_format", "an object", form)
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return ANY_OBJECT
        case "json_schema":
            return _read_schema(form.get("json_schema"))
    raise NotServed(
        "response_format.type must be text, json_object or json_schema", field="response_format"
    )


def _read_schema(described: object) -> Structure:
    """A schema is kept to whether it is called strict or not."""
    if not isinstance(described, dict):
        raise wrong_type("response_format.json_schema", "an object", described)
    schema = described.get("schema")
    if schema is None:
        return ANY_OBJECT
    if not isinstance(schema, dict):
        raise wrong_type("response_format.json_schema.schema", "an object", schema)
    return Structure("json_schema", json.dumps(schema))


FORMAT_SCHEMA: Json = {
    "anyOf": [
        object_of({"type": {"enum": ["text", "json_object"]}}, required=["type"]),
        object_of(
            {
                "type": {"const": "json_schema"},
                "json_schema": object_of({"schema": {"type": ["object", "null"]}}),
            },
            required=["type", "json_schema"],
        ),
        {"type": "null"},
    ],
    "description": "What the answer must read as; at most one of this, regex and grammar.",
}

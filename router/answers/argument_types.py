"""Types of a tool's arguments, for formats in which models write values as plain text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from baton.core.types import Tool

Schema = dict[str, Any]

_KINDS = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
# Python's words, which templates write when they turn values into text.
_WORDS = {"True": "true", "False": "false", "None": "null"}
_DEFINITIONS = ("$defs", "definitions")


class Argument(NamedTuple):
    key: str
    schema: Schema
    required: bool


def argument_schemas(tool: Tool) -> Iterator[Argument]:
    """Yields each argument with a self-contained schema."""
    whole = json.loads(tool.parameters)
    properties, required = whole.get("properties"), _listed(whole.get("required"))
    shared = {name: whole[name] for name in _DEFINITIONS if name in whole}
    for key, schema in (properties if isinstance(properties, dict) else {}).items():
        found = _resolved(schema, whole)
        yield Argument(key, {**shared, **found}, key in required)


def _resolved(schema: object, whole: Schema) -> Schema:
    """Returns the schema, or the definition of its document that it refers to."""
    found: Any = schema
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if isinstance(reference, str) and reference.startswith("#/"):
        found = whole
        for part in reference[2:].split("/"):
            found = found.get(part, {}) if isinstance(found, dict) else {}
    return found if isinstance(found, dict) else {}


def types_of(schema: Schema) -> set[str]:
    """Returns the types that a value may have; nothing if the schema does not say."""
    given = schema.get("type")
    if given is not None:
        return {each for each in _listed(given) or [given] if isinstance(each, str)}
    if "enum" in schema or "const" in schema:
        values = _listed(schema.get("enum", [schema.get("const")]))
        return {_KINDS[type(value)] for value in values}
    choices = _listed(schema.get("anyOf") or schema.get("oneOf"))
    found = [types_of(choice) if isinstance(choice, dict) else set() for choice in choices]
    return set().union(*found) if all(found) else set()


def _listed(value: object) -> list[Any]:
    """Returns a list, or an empty one for anything else: callers' schemas are not checked."""
    return value if isinstance(value, list) else []


def is_scalar(schema: Schema) -> bool:
    """True if a value must be a number, a boolean or null."""
    types = types_of(schema)
    return bool(types) and types <= {"integer", "number", "boolean", "null"}


def is_text(schema: Schema) -> bool:
    """True if a value may be any text, which is written without quotes."""
    types = types_of(schema)
    return not types or "string" in types


def as_json(text: str, schema: Schema) -> str:
    """Converts a value that was written as text to JSON: of the schema's type, or else a string."""
    types, written = types_of(schema), _WORDS.get(text.strip(), text.strip())
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    try:
        kind = _KINDS[type(json.loads(written, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return written if fits or "string" not in types else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)

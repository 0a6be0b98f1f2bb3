"""The parts that JSON schemas are made of."""

from __future__ import annotations

from collections.abc import Iterable

from baton.router.edges.http.fields import Field, Json


def described(fields: Iterable[Field]) -> Json:
    return {field.name: field.schema for field in fields}


def object_of(
    properties: Json, *, required: Iterable[str] = (), fields: Iterable[Field] = ()
) -> Json:
    return {
        "type": "object",
        "required": list(required),
        "properties": {**properties, **described(fields)},
    }


def exact(properties: Json) -> Json:
    """All of these, and nothing else."""
    return {**object_of(properties, required=properties), "additionalProperties": False}


def list_of(items: Json) -> Json:
    return {"type": "array", "items": items}


def or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}

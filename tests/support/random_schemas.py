"""Random JSON Schemas whose answers all end: repetition is bounded."""

from __future__ import annotations

import random

Schema = dict[str, object]


def random_schema(draw: random.Random, depth: int = 2) -> Schema:
    """A schema of an object."""
    return _object(draw, depth)


def _any(draw: random.Random, depth: int) -> Schema:
    plain = [_string, _integer, _choice, _constant, _flag, _pattern, _date]
    nested = [_object, _array, _either] if depth else []
    return draw.choice([*plain, *nested])(draw, depth - 1)


def _string(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 4)}


def _integer(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(-200, 200)
    return {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 500)}


def _choice(draw: random.Random, depth: int) -> Schema:
    values = ["red", "grün", 'a "quote"', 7, -1.5, None, True]
    return {"enum": draw.sample(values, draw.randint(1, 4))}


def _constant(draw: random.Random, depth: int) -> Schema:
    return {"const": draw.choice(["fixed", 3, False, None, ["a", 1], {"k": "v"}])}


def _flag(draw: random.Random, depth: int) -> Schema:
    return {"type": draw.choice(["boolean", "null", ["boolean", "null"]])}


def _pattern(draw: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": draw.choice(["^[a-f]{2,5}$", "^(yes|no)$", r"^\d{3}-x$"])}


def _date(draw: random.Random, depth: int) -> Schema:
    return {"type": "string", "format": draw.choice(["date", "uuid", "ipv4"])}


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    items = _any(draw, depth)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(["name", "größe", "a b", "id", "x-y", "tags", "when"], draw.randint(1, 4))
    required = [name for name in names if draw.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: _any(draw, depth) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _either(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(draw, depth), _any(draw, depth)]}

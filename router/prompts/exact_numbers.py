"""Numbers of JSON Schemas that llguidance, which has 64 bits for each, would change silently."""

from __future__ import annotations

EXACT = 2**53 - 1
"""Up to here each integer is a number of its own."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
"""Their keys are names of the caller's, such as a property `const`."""


def with_exact_numbers(schema: object) -> object:
    """Returns the schema with bounds that are exact: a bound beyond EXACT, such as the least 64-bit
    integer, becomes EXACT, so that every answer still follows the schema. Raises ValueError for a
    fixed integer beyond it."""
    if isinstance(schema, list):
        return [with_exact_numbers(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    for name in ("const", "enum"):
        _check_fixed(schema.get(name))
    return {name: _exact_value(name, value) for name, value in schema.items()}


def _exact_value(name: str, value: object) -> object:
    if name in _BY_NAME and isinstance(value, dict):
        return {each: with_exact_numbers(schema) for each, schema in value.items()}
    if name in _BOUNDS and isinstance(value, int | float):
        return value if -EXACT <= value <= EXACT else _nearest(name, value)
    return value if name in ("const", "enum") else with_exact_numbers(value)


def _nearest(name: str, bound: float) -> int:
    least = name in ("minimum", "exclusiveMinimum")
    if (bound > 0) == least:
        raise ValueError(f"{name} {bound} is beyond {EXACT}, where integers are not exact")
    return -EXACT if least else EXACT


def _check_fixed(value: object) -> None:
    """Raises ValueError for an integer beyond EXACT within a constant."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            _check_fixed(each)
    elif isinstance(value, int) and abs(value) > EXACT:
        raise ValueError(f"the integer {value} is beyond {EXACT}, where integers are not exact")

"""Protobuf messages as JSON for people and scripts, and the schema of this JSON.

Unlike in protobuf's own JSON, every field is present, 64-bit numbers are numbers, seconds are
rounded to microseconds, and an enum's value is its name without the enum's ("prefill", not
"ROLE_PREFILL").
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

Json = dict[str, object]

_DIGITS = 6
_TYPES = {
    FieldDescriptor.CPPTYPE_STRING: "string",
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_FLOAT: "number",
    FieldDescriptor.CPPTYPE_DOUBLE: "number",
}


def to_json(message: Message) -> Json:
    values = {}
    for field in cast(Descriptor, message.DESCRIPTOR).fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            value = [_value(field, item) for item in cast(Iterable[object], value)]
        else:
            value = _value(field, value)
        values[field.name] = value
    return values


def _value(field: FieldDescriptor, value: object) -> object:
    if isinstance(value, Message):
        return to_json(value)
    if isinstance(value, float):
        return round(value, _DIGITS)
    if field.enum_type is not None:
        return _enum_name(field.enum_type, cast(int, value))
    return value


def json_schema(message: type[Message]) -> Json:
    """The JSON schema of `to_json`'s output for messages of this type."""
    return _object_schema(cast(Descriptor, message.DESCRIPTOR))


def _object_schema(message: Descriptor) -> Json:
    properties: Json = {}
    for field in message.fields:
        one = _value_schema(field)
        properties[field.name] = {"type": "array", "items": one} if field.is_repeated else one
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _value_schema(field: FieldDescriptor) -> Json:
    if field.message_type is not None:
        return _object_schema(field.message_type)
    if (enum := field.enum_type) is not None:
        return {"enum": [_enum_name(enum, each.number) for each in enum.values]}
    return {"type": _TYPES.get(field.cpp_type, "integer")}


def _enum_name(enum: EnumDescriptor, number: int) -> str:
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
    known = enum.values_by_number.get(number)
    return known.name.removeprefix(f"{prefix}_").lower() if known else str(number)

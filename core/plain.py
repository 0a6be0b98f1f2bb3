"""A protobuf message as plain values, for JSON that people and scripts read.

As protobuf's own JSON, but: every field is there, 64-bit numbers are numbers, seconds end at
the microsecond, and an enum's value is its name without the enum's ("prefill", not
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
_KINDS = {
    FieldDescriptor.CPPTYPE_STRING: "string",
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_FLOAT: "number",
    FieldDescriptor.CPPTYPE_DOUBLE: "number",
    FieldDescriptor.CPPTYPE_INT32: "integer",
    FieldDescriptor.CPPTYPE_UINT32: "integer",
    FieldDescriptor.CPPTYPE_INT64: "integer",
    FieldDescriptor.CPPTYPE_UINT64: "integer",
}


def plain(message: Message) -> Json:
    return {
        field.name: _field(field, getattr(message, field.name))
        for field in cast(Descriptor, message.DESCRIPTOR).fields
    }


def schema(message: type[Message]) -> Json:
    """The JSON schema of what `plain` makes of such a message."""
    return _schema(cast(Descriptor, message.DESCRIPTOR))


def _schema(message: Descriptor) -> Json:
    properties = {field.name: _field_schema(field) for field in message.fields}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _field_schema(field: FieldDescriptor) -> Json:
    one = _value_schema(field)
    return {"type": "array", "items": one} if field.is_repeated else one


def _value_schema(field: FieldDescriptor) -> Json:
    if field.message_type is not None:
        return _schema(field.message_type)
    if field.enum_type is not None:
        return {
            "enum": [_enum_name(field.enum_type, each.number) for each in field.enum_type.values]
        }
    return {"type": _KINDS[field.cpp_type]}


def _field(field: FieldDescriptor, value: object) -> object:
    if field.is_repeated:
        return [_value(field, item) for item in cast(Iterable[object], value)]
    return _value(field, value)


def _value(field: FieldDescriptor, value: object) -> object:
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, float):
        return round(value, _DIGITS)
    if field.enum_type is not None and isinstance(value, int):
        return _enum_name(field.enum_type, value)
    return value


def _enum_name(enum: EnumDescriptor, number: int) -> str:
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
    known = enum.values_by_number.get(number)
    return known.name.removeprefix(f"{prefix}_").lower() if known else str(number)

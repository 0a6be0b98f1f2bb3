"""Hypothesis strategies for any message: each field absent, ordinary or at its type's limits."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_UNSIGNED = {FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1, FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1}
_FLOATS = {FieldDescriptor.CPPTYPE_FLOAT: 32, FieldDescriptor.CPPTYPE_DOUBLE: 64}
_EDGES = (0, 1, 2, 16, 17, 20, 21, 1024, 8192, 49151, 49152)
_STRINGS = ("", "x", "\0", "é", "a" * 129, "b" * 1025, "{", "(", '{"type": "string"}')
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)


def messages(descriptor: Descriptor, depth: int = 4) -> st.SearchStrategy[Message]:
    """`depth` limits nested messages, which may be recursive."""
    fields = {
        field.name: _field(field, depth - 1)
        for field in descriptor.fields
        if depth or not field.message_type
    }
    return st.fixed_dictionaries({}, optional=fields).map(
        lambda values: GetMessageClass(descriptor)(**values)
    )


def _field(field: FieldDescriptor, depth: int) -> st.SearchStrategy[object]:
    if field.message_type and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        return st.dictionaries(
            _value(entry["key"], depth), _value(entry["value"], depth), max_size=3
        )
    value = _value(field, depth)
    if field.is_repeated:
        # Longer than any limit, with a few values again and again: to draw many takes long.
        many = st.lists(value, min_size=1, max_size=3).map(lambda few: (few * 17)[:17])
        return st.lists(value, max_size=3) | many
    return value


def _value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[object]:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:
        return messages(field.message_type, depth)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=40)
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return st.sampled_from(_STRINGS) | _TEXT
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind in _FLOATS:
        return st.floats(width=_FLOATS[kind])
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return st.sampled_from([*(value.number for value in field.enum_type.values), 99])
    if kind == FieldDescriptor.CPPTYPE_INT32:
        return st.sampled_from((0, 1000, -1001)) | st.integers(-(2**31), 2**31 - 1)
    if kind == FieldDescriptor.CPPTYPE_INT64:
        return st.sampled_from((0, 1, -1)) | st.integers(-(2**63), 2**63 - 1)
    most = _UNSIGNED[kind]
    return st.sampled_from((*_EDGES, most)) | st.integers(0, most)

"""Reads one tool call, a JSON object, as its text comes.

    {"name": "weather", "arguments": {"city": "Paris"}}

The name is told as soon as it is there, and then the text of the arguments as
it comes, untouched. Where the arguments stand before the name, all is told at
the end. An object that is no call of a known tool is Malformed; until the name
has been told, whoever reads can still show the text as it is.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

ARGUMENT_KEYS = ("arguments", "parameters")
LONGEST_HEAD = 256
"""Characters of a call's name, id and marks, where they stand before its arguments."""

_SPACE = " \t\r\n"


class Malformed(Exception):
    """What was read is not a call."""


@dataclass(slots=True)
class Told:
    """What some text has told of a call."""

    name: str = ""
    arguments: str = ""


class _State(Enum):
    OPEN = auto()  # before {
    KEY = auto()  # before a key, or }
    COLON = auto()
    VALUE = auto()
    NEXT = auto()  # before , or }
    DONE = auto()


class CallReader:
    """Takes characters until `done`; what it told before stays told."""

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = tools
        self._state = _State.OPEN
        self._key = ""
        self._value = JsonValue()
        self._raw = ""
        self._arguments = ""  # that came before the name
        self.name = ""
        self._has_arguments = False

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    def push(self, character: str) -> Told:
        """What one more character tells."""
        if self._state in (_State.KEY, _State.VALUE) and self._raw:
            return self._go_on(character)
        if character in _SPACE:
            return Told()
        match self._state, character:
            case (_State.OPEN, "{"):
                self._state = _State.KEY
            case (_State.KEY, '"'):
                self._begin(character)
            case (_State.COLON, ":"):
                self._state = _State.VALUE
            case (_State.VALUE, _):
                return self._begin(character)
            case (_State.NEXT, ","):
                self._state = _State.KEY
            case (_State.NEXT, "}"):
                return self._end()
            case _:
                raise Malformed
        return Told()

    def _begin(self, character: str) -> Told:
        self._value = JsonValue()
        self._raw = character
        self._value.push(character)
        if self._streams and character != "{":
            raise Malformed
        return Told(arguments=character) if self._streams else Told()

    @property
    def _streams(self) -> bool:
        return self._state is _State.VALUE and self._key in ARGUMENT_KEYS and bool(self.name)

    def _go_on(self, character: str) -> Told:
        if self._value.ends_before(character):
            told = self._settle()
            return Told(told.name, told.arguments + self.push(character).arguments)
        self._raw += character
        streams = self._streams
        told = Told(arguments=character) if streams else Told()
        if self._value.push(character):
            settled = self._settle()
            return told if streams else settled
        return told

    def _settle(self) -> Told:
        """A key or a value is complete."""
        raw, self._raw = self._raw, ""
        try:
            value = json.loads(raw)
        except ValueError:
            raise Malformed from None
        if self._state is _State.KEY:
            self._key, self._state = value, _State.COLON
            return Told()
        self._state = _State.NEXT
        if self._key == "name":
            return self._take_name(value)
        if self._key in ARGUMENT_KEYS:
            self._take_arguments(raw, value)
        return Told()

    def _take_name(self, name: object) -> Told:
        if self.name or not isinstance(name, str) or name not in self._tools:
            raise Malformed
        self.name = name
        return Told(name, self._arguments)

    def _take_arguments(self, raw: str, value: object) -> None:
        if self._has_arguments or not isinstance(value, dict):
            raise Malformed
        self._has_arguments = True
        if not self.name:
            self._arguments = raw

    def _end(self) -> Told:
        if not self.name:
            raise Malformed
        self._state = _State.DONE
        return Told() if self._has_arguments else Told(arguments="{}")


class NamedCallReader:
    """The same for a call whose name stands before its arguments: weather[ARGS]{"city": "Paris"}.

    An id that is written between the two is not kept. Nothing is told before the
    arguments begin.
    """

    def __init__(self, tools: Collection[str], divider: str, id_mark: str) -> None:
        self._tools = tools
        self._divider = divider
        self._id_mark = id_mark
        self._head = ""  # before the arguments
        self._value = JsonValue()
        self.name = ""
        self.done = False

    def push(self, character: str) -> Told:
        if self.name:
            self.done = self._value.push(character)
            return Told(arguments=character)
        if not self._head.endswith(self._divider):
            self._head += character
            if len(self._head) > LONGEST_HEAD:
                raise Malformed
            return Told()
        return Told() if character in _SPACE else self._begin(character)

    def _begin(self, character: str) -> Told:
        head = self._head.removesuffix(self._divider)
        name = head.partition(self._id_mark)[0].strip()
        if character != "{" or name not in self._tools:
            raise Malformed
        self.name = name
        self._value.push(character)
        return Told(name, character)


class JsonValue:
    """Finds the end of one JSON value."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._plain = False  # a number, true, false or null

    def ends_before(self, character: str) -> bool:
        return self._plain and self._depth == 0 and character in f"{_SPACE},}}]"

    def push(self, character: str) -> bool:
        """Whether the value ends with this character."""
        if self._in_string:
            self._push_in_string(character)
            return not self._in_string and self._depth == 0
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        else:
            self._plain = True
        return False

    def _push_in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False

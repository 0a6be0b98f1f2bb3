"""Finds tool calls in an answer's text while it streams.

    content ─opener─▶ before a call ─{─▶ within it ─}─▶ after it ─▶ content, or before the next
                          └──────────────┴─ not a call: becomes content, as it was written

Text that may begin a call is held back until that is decided. A call's name is emitted as soon as
it is known, then the text of its arguments as it comes. Until the name has been emitted, a
malformed call can still become content.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

from baton.router.answers.answer_events import AnswerDelta, ToolCallDelta
from baton.router.answers.answer_format import ToolFormat
from baton.router.answers.splitters import held_back

ARGUMENT_KEYS = ("arguments", "parameters")
MAX_HEAD = 256
"""Characters of a call's name, id and markers before its arguments."""

_SPACE = " \t\r\n"


class Malformed(Exception):
    """The scanned text is not a call of a known tool."""


class _Place(Enum):
    CONTENT = auto()
    BEFORE = auto()  # the list's bracket, or the call
    WITHIN = auto()
    AFTER = auto()  # the closer, a separator, or content


class ToolCallSplitter:
    def __init__(self, form: ToolFormat, tools: Collection[str]) -> None:
        self._form = form
        self._tools = tools
        self._place = _Place.CONTENT
        self._held = ""  # not scanned yet
        self._scanned = ""  # scanned but not emitted: may turn out not to be a call
        self._has_content = False  # other than white space
        self._in_list = False
        self._scanner = self._new_scanner()
        self._calls = 0  # whose name was emitted
        self._after_call = False  # no content since the last call

    def _new_scanner(self) -> CallScanner | NamedCallScanner:
        form = self._form
        if form.divider:
            return NamedCallScanner(self._tools, form.divider, form.id_mark)
        return CallScanner(self._tools)

    def push(self, text: str, delta: AnswerDelta) -> None:
        self._held += text
        while self._held:
            if self._place is not _Place.CONTENT:
                self._scan(delta)
                continue
            self._find_call(delta)
            if self._place is _Place.CONTENT:
                return  # what is held back needs more text

    def flush(self, delta: AnswerDelta) -> None:
        """An unfinished call becomes content unless its name was emitted."""
        named = self._place is _Place.WITHIN and self._scanner.name
        if not named and self._place is not _Place.AFTER:
            self._add_content(self._scanned + self._held, delta)

    def _find_call(self, delta: AnswerDelta) -> None:
        """Emits content up to what may begin a call."""
        held, opener = self._held, self._form.opener
        may_be_bare = self._form.bare and not self._has_content
        begun = held.lstrip()
        if may_be_bare and begun.startswith("{"):
            self._open(len(held) - len(begun), 0, delta)
        elif opener in held:
            self._open(held.index(opener), len(opener), delta)
        elif begun or not may_be_bare:
            end = len(held) - held_back(held, [opener])
            self._held = held[end:]
            self._add_content(held[:end], delta)

    def _open(self, start: int, length: int, delta: AnswerDelta) -> None:
        """A call may begin at `start`, with a marker of that length."""
        content, end = self._held[:start], start + length
        self._scanned, self._held = self._held[start:end], self._held[end:]
        self._place, self._in_list = _Place.BEFORE, False
        self._scanner = self._new_scanner()
        self._add_content(content, delta)

    def _add_content(self, text: str, delta: AnswerDelta) -> None:
        if self._after_call:
            text = text.lstrip()  # white space after calls is not content
            self._after_call = not text
        self._has_content = self._has_content or bool(text.strip())
        delta.text += text

    def _scan(self, delta: AnswerDelta) -> None:
        character, self._held = self._held[0], self._held[1:]
        self._scanned += character
        try:
            match self._place:
                case _Place.BEFORE:
                    self._before(character, delta)
                case _Place.WITHIN:
                    self._within(character, delta)
                case _:
                    self._after()
        except Malformed:
            self._give_up(delta)

    def _before(self, character: str, delta: AnswerDelta) -> None:
        if character in _SPACE:
            return
        if self._form.listed and not self._in_list:
            if character != "[":
                raise Malformed
            self._in_list = True
            return
        self._place = _Place.WITHIN
        self._within(character, delta)

    def _within(self, character: str, delta: AnswerDelta) -> None:
        scanner, named = self._scanner, bool(self._scanner.name)
        arguments = scanner.push(character)
        if scanner.name and not named:
            delta.tool_calls += (ToolCallDelta(self._calls, self._form.new_id(), scanner.name),)
            self._calls += 1
        if arguments:
            self._add_arguments(arguments, delta)
        if scanner.name:
            self._scanned = ""
        if scanner.done:
            self._place, self._after_call = _Place.AFTER, True

    def _add_arguments(self, text: str, delta: AnswerDelta) -> None:
        if not delta.tool_calls or delta.tool_calls[-1].name:
            delta.tool_calls += (ToolCallDelta(self._calls - 1),)
        delta.tool_calls[-1].arguments += text

    def _after(self) -> None:
        """Only the format's own markers may follow a call; anything else is content."""
        form, scanned = self._form, self._scanned.lstrip()
        if not scanned:
            return
        if scanned == form.separator:
            self._scanned, self._place = "", _Place.BEFORE
            self._scanner = self._new_scanner()
        elif scanned == form.closer or (self._in_list and scanned == "]"):
            self._scanned, self._place = "", _Place.CONTENT
        elif not form.closer.startswith(scanned):
            raise Malformed

    def _give_up(self, delta: AnswerDelta) -> None:
        """Goes back to where the call began; its first marker or character is content."""
        text, self._scanned = self._scanned, ""
        marker = ""
        if self._place is not _Place.AFTER:
            opener = self._form.opener
            marker = opener if text.startswith(opener) else text[:1]
        self._place, self._has_content = _Place.CONTENT, True
        self._held = text[len(marker) :] + self._held
        self._add_content(marker, delta)


class _Expect(Enum):
    OPEN = auto()  # {
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()  # , or }


class CallScanner:
    """Scans one call as a JSON object: {"name": "weather", "arguments": {"city": "Paris"}}, its
    keys in any order. Arguments before the name are emitted with it."""

    def __init__(self, tools: Collection[str]) -> None:
        self.name = ""
        self.done = False
        self._tools = tools
        self._expect = _Expect.OPEN
        self._key = ""
        self._raw = ""  # of the key or value being scanned
        self._value = JsonValue()
        self._arguments: str | None = None  # once they are complete

    def push(self, character: str) -> str:
        """Returns the text of the arguments that the character lets out."""
        if self._raw:
            return self._continue(character)
        if character in _SPACE:
            return ""
        match self._expect, character:
            case (_Expect.OPEN, "{") | (_Expect.NEXT, ","):
                self._expect = _Expect.KEY
            case (_Expect.COLON, ":"):
                self._expect = _Expect.VALUE
            case (_Expect.KEY, '"') | (_Expect.VALUE, _):
                return self._begin(character)
            case (_Expect.NEXT, "}") if self.name:
                self.done = True
                return "{}" if self._arguments is None else ""
            case _:
                raise Malformed
        return ""

    @property
    def _streams(self) -> bool:
        """Whether the value being scanned is emitted as it comes."""
        is_value = self._expect is _Expect.VALUE
        return is_value and self._key in ARGUMENT_KEYS and bool(self.name)

    def _begin(self, character: str) -> str:
        self._value = JsonValue()
        self._raw = character
        self._value.push(character)
        if self._streams and character != "{":
            raise Malformed
        return character if self._streams else ""

    def _continue(self, character: str) -> str:
        if self._value.ends_before(character):
            return self._complete() + self.push(character)
        self._raw += character
        streams = self._streams
        complete = self._complete() if self._value.push(character) else ""
        return character if streams else complete

    def _complete(self) -> str:
        """A key or a value is complete. Returns the arguments that its name lets out."""
        raw, self._raw = self._raw, ""
        try:
            value = json.loads(raw)
        except ValueError:
            raise Malformed from None
        if self._expect is _Expect.KEY:
            self._key, self._expect = value, _Expect.COLON
            return ""
        self._expect = _Expect.NEXT
        if self._key == "name":
            if self.name or not isinstance(value, str) or value not in self._tools:
                raise Malformed
            self.name = value
            return self._arguments or ""
        if self._key in ARGUMENT_KEYS:
            if self._arguments is not None or not isinstance(value, dict):
                raise Malformed
            self._arguments = raw
        return ""


class NamedCallScanner:
    """Scans a call whose name comes before its arguments: weather[ARGS]{"city": "Paris"}. An id
    between the two is dropped. Nothing is emitted before the arguments begin."""

    def __init__(self, tools: Collection[str], divider: str, id_mark: str) -> None:
        self.name = ""
        self.done = False
        self._tools = tools
        self._divider = divider
        self._id_mark = id_mark
        self._head = ""  # before the arguments
        self._value = JsonValue()

    def push(self, character: str) -> str:
        if not self.name:
            if not self._head.endswith(self._divider):
                self._head += character
                if len(self._head) > MAX_HEAD:
                    raise Malformed
                return ""
            if character in _SPACE:
                return ""
            self._begin(character)
        self.done = self._value.push(character)
        return character

    def _begin(self, character: str) -> None:
        head = self._head.removesuffix(self._divider)
        name = head.partition(self._id_mark)[0].strip()
        if character != "{" or name not in self._tools:
            raise Malformed
        self.name = name


class JsonValue:
    """Finds the end of one JSON value."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._bare = False  # a number, true, false or null

    def ends_before(self, character: str) -> bool:
        return self._bare and self._depth == 0 and character in f"{_SPACE},}}]"

    def push(self, character: str) -> bool:
        """Whether the value ends with this character."""
        if self._in_string:
            if self._escaped or character == "\\":
                self._escaped = not self._escaped
            elif character == '"':
                self._in_string = False
                return self._depth == 0
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        else:
            self._bare = True
        return False

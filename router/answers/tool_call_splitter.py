"""Finds tool calls in an answer's text while it streams, in any of the formats of
router/answers/tool_formats.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import Any

from baton.core.types import Tool
from baton.router.answers.answer_events import AnswerDelta, ToolCallDelta
from baton.router.answers.argument_types import Schema, argument_schemas, as_json, types_of
from baton.router.answers.splitters import SteppedSplitter, Steps, held_back
from baton.router.answers.tool_formats import Pairs, ToolFormat

ARGUMENT_KEYS = ("arguments", "parameters")
MAX_HEAD = 256
"""Characters of a call's name, id and markers before its arguments."""

_SPACE = " \t\r\n"
_STRUCTURE = "{}[]:,"


class Malformed(Exception):
    """The scanned text is not a call of a known tool."""


class ToolCallSplitter(SteppedSplitter):
    """Splits off tool calls.

        content ─opener─▶ before a call ─{─▶ within it ─}─▶ after it ─▶ content, or before the next
                              └──────────────┴─ not a call: becomes content, unchanged

    Text that may begin a call is held back until that is decided. A call's name is emitted as soon
    as it is known, then its arguments as they come. Until its name is emitted, a malformed call
    becomes content.
    """

    def __init__(
        self, form: ToolFormat, tools: Sequence[Tool], new_id: Callable[[], str] | None = None
    ) -> None:
        """`new_id` makes the id of the next call; by default, one of the format."""
        super().__init__()
        self._section = [marker for marker in form.section if marker]
        self._marks = [form.opener, *self._section]
        self._form = form
        self._new_id = new_id or form.new_id
        self._tools = {tool.name: tool for tool in tools}
        self._scanned = ""  # scanned but not emitted: may turn out not to be a call
        self._has_content = False  # other than white space
        self._calls = 0  # calls whose name was emitted
        self._named = False  # the name of the call being scanned was emitted
        self._closing = False  # a call is complete; markers of the format may follow it
        self._after_call = False  # no content since the last call

    def flush(self, delta: AnswerDelta) -> None:
        """Emits an unfinished call as content unless its name was emitted."""
        self._delta = delta
        if not self._closing:
            self._add_content(self._scanned + self._held)

    def _split(self) -> Steps:
        while True:
            while not self._find_call():
                yield
            try:
                yield from self._scan_calls()
            except Malformed:
                self._give_up()

    def _find_call(self) -> bool:
        """Emits content up to what may begin a call, and scans the opener. Returns True if there
        is one."""
        held, opener = self._held, self._form.opener
        begun = held.lstrip()
        may_be_bare = self._form.bare and not self._has_content
        if may_be_bare and begun.startswith("{"):
            opener, start = "", len(held) - len(begun)
        else:
            start = held.find(opener)
        found = start >= 0
        if not found:
            held_from = len(held) - held_back(held, self._marks)
            opener, start = "", 0 if may_be_bare and not begun else held_from
        self._scanned, self._held = opener, held[start + len(opener) :]
        self._add_content(held[:start])
        return found

    def _add_content(self, text: str) -> None:
        """Emits content without a section's markers, after which white space is dropped as after a
        call."""
        for marker in self._section:
            before, found, after = text.partition(marker)
            if found:
                self._add_content(before)
                self._after_call, text = True, after
        if self._after_call:
            text = text.lstrip()  # white space after calls is not content
            self._after_call = not text
        self._has_content = self._has_content or bool(text.strip())
        self._delta.text += text

    def _scan_calls(self) -> Steps:
        form, another = self._form, True
        if not form.named and form.before.strip():
            yield from self._marker(form.before.strip())
        while another:
            self._closing = False
            yield from self._named_call() if form.named else self._json_call()
            self._scanned, self._named = "", False
            self._closing = self._after_call = True
            another = yield from self._separator()
        self._closing = False

    def _separator(self) -> Generator[None, None, bool]:
        """Scans the format's marker after a call. Returns True if another call must follow."""
        separator, closer = self._form.separator, self._form.closer.strip()
        while True:
            yield from self._next()
            scanned = self._scanned.lstrip()
            if scanned and scanned in (separator, closer):
                self._scanned = ""
                return scanned == separator
            _require(closer.startswith(scanned))

    def _give_up(self) -> None:
        """Goes back to the beginning of what is not a call, and emits its first marker or character
        as content. After a complete call, emits nothing yet."""
        text, opener = self._scanned, self._form.opener
        marker = opener if text.startswith(opener) else text[:1]
        if self._closing:
            marker = ""
        self._scanned, self._held = "", text[len(marker) :] + self._held
        self._named = self._closing = False
        self._has_content = True
        self._add_content(marker)

    def _next(self) -> Generator[None, None, str]:
        """Scans one character."""
        if self._named:
            self._scanned = ""
        while not self._held:
            yield
        character, self._held = self._held[0], self._held[1:]
        self._scanned += character
        return character

    def _visible(self) -> Generator[None, None, str]:
        """Scans one character that is not white space."""
        while (character := (yield from self._next())) in _SPACE:
            pass
        return character

    def _json_call(self) -> Steps:
        """Scans {"name": "weather", "arguments": {"city": "Paris"}}, its keys in any order.
        Arguments before the name are emitted with it."""
        name, arguments = "", None
        character = yield from self._visible()
        _require(character == "{")
        while character != "}":
            _require((yield from self._visible()) == '"')
            key = _loads((yield from self._value('"'))[0])
            _require((yield from self._visible()) == ":")
            first = yield from self._visible()
            streams = bool(name) and key in ARGUMENT_KEYS
            _require(first == "{" or not streams)
            raw, character = yield from self._value(first, streams=streams)
            value = _loads(raw)
            if key == "name":
                _require(not name and isinstance(value, str) and value in self._tools)
                name = value
                self._emit_name(name, arguments or "")
            elif key in ARGUMENT_KEYS:
                _require(arguments is None and isinstance(value, dict))
                arguments = raw
                self._emit_arguments(raw[-1] if streams else "")
            if character in _SPACE:
                character = yield from self._visible()
            _require(character == "," or (character == "}" and bool(name)))
        if arguments is None:
            self._emit_arguments("{}")

    def _named_call(self) -> Steps:
        """Scans weather[ARGS]{"city": "Paris"}, or the format's pairs instead of JSON. Nothing is
        emitted before the arguments begin."""
        form = self._form
        head = yield from self._head()
        name = form.name_of(head)
        _require(name in self._tools)
        call_id = head.strip() if form.ids == "written" else ""
        if form.pairs:
            yield from self._pairs(form.pairs, name)
            return
        first = yield from self._visible()
        _require(first == "{")
        self._emit_name(name, call_id=call_id)
        if form.quote:
            yield from self._loose(LooseJson(form.quote))
            return
        raw, _ = yield from self._value(first, streams=True)
        self._emit_arguments(raw[-1])

    def _head(self) -> Generator[None, None, str]:
        """Scans the text up to the end of a call's name."""
        end, before = self._form.name_end, self._form.before.strip()
        if before and not end:
            yield from self._marker(before)
        head = yield from self._visible()
        while not head.endswith(end) if end else head[-1].isalnum() or head[-1] in "_-":
            head += yield from self._next()
            _require(len(head) <= MAX_HEAD)
        if not end:
            self._held, self._scanned = head[-1] + self._held, self._scanned[:-1]
        return head.removesuffix(end) if end else head[:-1]

    def _pairs(self, pairs: Pairs, name: str) -> Steps:
        """Scans keys and values and emits them as JSON."""
        schemas = {each.key: each.schema for each in argument_schemas(self._tools[name])}
        begin = "{"
        end = pairs.end.strip()
        marker = yield from self._marker(pairs.key, end)
        self._emit_name(name)
        while marker != end:
            key = (yield from self._until(pairs.key_end.strip())).strip()
            if pairs.value:
                yield from self._marker(pairs.value)
            self._emit_arguments(f"{begin}{json.dumps(key, ensure_ascii=False)}: ")
            begin = ", "
            yield from self._pair_value(pairs, schemas.get(key, {}))
            marker = yield from self._marker(pairs.key, end)
        self._emit_arguments("{}" if begin == "{" else "}")

    def _pair_value(self, pairs: Pairs, schema: Schema) -> Steps:
        """Emits a text as it comes, any other value when it is complete."""
        end, frame = pairs.value_end.strip(), pairs.frame
        if types_of(schema) != {"string"}:
            text = yield from self._until(end)
            self._emit_arguments(as_json(text.removeprefix(frame).removesuffix(frame), schema))
            return
        self._emit_arguments('"')
        held = (yield from self._next()).removeprefix(frame)
        while not held.endswith(end):
            sure = len(held) - held_back(held, [end, frame + end])
            self._emit_arguments(escaped(held[:sure]))
            held = held[sure:] + (yield from self._next())
        self._emit_arguments(escaped(held.removesuffix(end).removesuffix(frame)) + '"')

    def _loose(self, loose: LooseJson) -> Steps:
        """Scans an object after its first character and emits it as JSON."""
        self._emit_arguments(loose.push("{"))
        while not loose.done:
            self._emit_arguments(loose.push((yield from self._next())))

    def _marker(self, *markers: str) -> Generator[None, None, str]:
        """Scans white space, then one of the markers, which it returns."""
        text = yield from self._visible()
        while text not in markers:
            _require(any(marker.startswith(text) for marker in markers))
            text += yield from self._next()
        return text

    def _until(self, marker: str) -> Generator[None, None, str]:
        text = ""
        while not text.endswith(marker):
            text += yield from self._next()
        return text.removesuffix(marker)

    def _value(
        self, character: str, *, streams: bool = False
    ) -> Generator[None, None, tuple[str, str]]:
        """Scans one JSON value from its first character. Returns it, and the character after it if
        only that ended it. With `streams`, emits all but the last character."""
        raw, depth = "", 0
        quoted = escaped = bare = False  # in a string; after a backslash; a number or a word
        while True:
            raw += character
            if quoted:
                ends = character == '"' and not escaped
                escaped = character == "\\" and not escaped
                quoted = not ends
            else:
                quoted = character == '"'
                depth += (character in "{[") - (character in "}]")
                ends = character in "}]"
                bare = bare or character not in '"{[}]'
            if ends and depth == 0:
                return raw, ""
            if streams:
                self._emit_arguments(character)
            character = yield from self._next()
            if bare and depth == 0 and character in f"{_SPACE},}}]":
                return raw, character

    def _emit_name(self, name: str, arguments: str = "", call_id: str = "") -> None:
        call_id = call_id or self._new_id()
        self._delta.tool_calls += (ToolCallDelta(self._calls, call_id, name),)
        self._calls += 1
        self._named = True
        self._emit_arguments(arguments)

    def _emit_arguments(self, text: str) -> None:
        delta = self._delta
        if not text:
            return
        if not delta.tool_calls:
            delta.tool_calls += (ToolCallDelta(self._calls - 1),)
        delta.tool_calls[-1].arguments += text


def _require(condition: bool) -> None:
    if not condition:
        raise Malformed


def _loads(raw: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise Malformed from None


class LooseJson:
    """Turns an object or list in Gemma's notation into JSON, character by character:
    {city:<|"|>Paris<|"|>,days:3}. Keys are bare; strings are between markers, without escapes."""

    def __init__(self, quote: str) -> None:
        """`quote` is the marker before and after a string; JSON's quotes are accepted too."""
        self._quote = quote
        self._end = ""  # ends the open string; empty outside of strings
        self._held = ""
        self._depth = 0
        self.done = False

    def push(self, character: str) -> str:
        """Returns the JSON that is certain with this character."""
        self._held += character
        return self._in_string() if self._end else self._between()

    def _in_string(self) -> str:
        held, end = self._held, self._end
        if end == '"':
            # A JSON string: a backslash is held until the next character.
            self._held = held if held == "\\" else ""
            self._end = "" if held == end else end
            return "" if self._held else held
        closed = held.endswith(end)
        sure = len(held) - (len(end) if closed else held_back(held, [end]))
        self._held = "" if closed else held[sure:]
        self._end = "" if closed else end
        return escaped(held[:sure]) + ('"' if closed else "")

    def _between(self) -> str:
        held = self._held.lstrip()
        if held in (self._quote, '"'):
            self._held, self._end = "", held
            return '"'
        if held[-1:] not in tuple(_STRUCTURE):
            return ""
        word, sign, self._held = held[:-1].strip(), held[-1], ""
        self._depth += (sign in "{[") - (sign in "}]")
        self.done = self._depth == 0
        if word:
            word = json.dumps(word, ensure_ascii=False) if sign == ":" else as_json(word, {})
        return word + sign


def escaped(text: str) -> str:
    """Escapes a text for a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]

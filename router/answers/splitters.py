"""Splitters: separate an answer's text into content, reasoning and tool calls while it streams.

    text ─▶ ReasoningSplitter ─content─▶ ToolCallSplitter ─content─▶ ContentSplitter ─▶ AnswerDelta

Each is used only where the model and the request need it (router/answers/answer_format.py), and
holds back only text that may still become a marker. They scan in generators, which yield where
they need more text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Iterable
from typing import Any, Protocol

from baton.router.answers.answer_events import AnswerDelta, ToolCallDelta
from baton.router.answers.answer_format import END_THINK, THINK, ToolFormat

ARGUMENT_KEYS = ("arguments", "parameters")
MAX_HEAD = 256
"""Characters of a call's name, id and markers before its arguments."""

_SPACE = " \t\r\n"

Steps = Generator[None, None, None]


class Splitter(Protocol):
    def push(self, text: str, delta: AnswerDelta) -> None:
        """Adds what the text contributes to the delta."""

    def flush(self, delta: AnswerDelta) -> None:
        """Adds what was held back; no more text comes."""


class ContentSplitter:
    """All text is content."""

    def push(self, text: str, delta: AnswerDelta) -> None:
        delta.text += text

    def flush(self, delta: AnswerDelta) -> None:
        pass


class ReasoningSplitter:
    """A reasoning model writes <think>, its reasoning, </think> and then its content. Some chat
    templates write the <think> themselves. White space around the markers is dropped."""

    def __init__(self, *, thinking: bool, content: Splitter) -> None:
        """`thinking` when the prompt ends within the reasoning; `content` gets the rest."""
        self._thinking = thinking
        self._content = content
        self._held = ""
        self._delta = AnswerDelta("", [])  # of the text that was pushed last
        self._steps = self._split()

    def push(self, text: str, delta: AnswerDelta) -> None:
        self._held += text
        self._delta = delta
        next(self._steps)

    def flush(self, delta: AnswerDelta) -> None:
        if self._thinking:
            delta.reasoning += self._held.rstrip()
        else:
            self._content.push(self._held, delta)
        self._content.flush(delta)

    def _split(self) -> Steps:
        while not self._thinking:
            begun = self._held.lstrip()
            if begun.startswith(THINK):
                self._thinking, self._held = True, begun[len(THINK) :]
            elif THINK.startswith(begun):
                yield
            else:
                break
        if self._thinking:
            yield from self._think()
        while True:
            held, self._held = self._held, ""
            self._content.push(held, self._delta)
            yield

    def _think(self) -> Steps:
        """Emits the reasoning, and drops the white space after it."""
        begun = False
        while self._thinking:
            reasoning, marker, rest = self._held.partition(END_THINK)
            if not marker:
                reasoning = reasoning[: len(reasoning) - held_back(reasoning, [END_THINK])]
            reasoning = reasoning.rstrip()
            self._delta.reasoning += reasoning if begun else reasoning.lstrip()
            begun = begun or bool(reasoning)
            self._held = rest if marker else self._held[len(reasoning) :]
            self._thinking = not marker
            if self._thinking:
                yield
        while not (held := self._held.lstrip()):
            self._held = ""
            yield
        self._held = held


class Malformed(Exception):
    """The scanned text is not a call of a known tool."""


class ToolCallSplitter:
    """Finds tool calls.

        content ─opener─▶ before a call ─{─▶ within it ─}─▶ after it ─▶ content, or before the next
                              └──────────────┴─ not a call: becomes content, as it was written

    Text that may begin a call is held back until that is decided. A call's name is emitted as soon
    as it is known, then the text of its arguments as it comes. Until the name has been emitted, a
    malformed call can still become content.
    """

    def __init__(
        self, form: ToolFormat, tools: Collection[str], new_id: Callable[[], str] | None = None
    ) -> None:
        """`new_id` makes the id of the next call; by default, as the format has them."""
        self._form = form
        self._new_id = new_id or form.new_id
        self._tools = tools
        self._delta = AnswerDelta("", [])  # of the text that was pushed last
        self._held = ""  # not scanned yet
        self._scanned = ""  # scanned but not emitted: may turn out not to be a call
        self._has_content = False  # other than white space
        self._calls = 0  # whose name was emitted
        self._named = False  # the name of the call being scanned was emitted
        self._closing = False  # a call is complete; markers of the format may follow it
        self._after_call = False  # no content since the last call
        self._steps = self._split()

    def push(self, text: str, delta: AnswerDelta) -> None:
        self._held += text
        self._delta = delta
        next(self._steps)

    def flush(self, delta: AnswerDelta) -> None:
        """An unfinished call becomes content unless its name was emitted."""
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
        """Emits content up to what may begin a call, whose opener counts as scanned."""
        held, opener = self._held, self._form.opener
        begun = held.lstrip()
        may_be_bare = self._form.bare and not self._has_content
        if may_be_bare and begun.startswith("{"):
            opener, start = "", len(held) - len(begun)
        else:
            start = held.find(opener)
        found = start >= 0
        if not found:
            held_from = len(held) - held_back(held, [opener])
            opener, start = "", 0 if may_be_bare and not begun else held_from
        self._scanned, self._held = opener, held[start + len(opener) :]
        self._add_content(held[:start])
        return found

    def _add_content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()  # white space after calls is not content
            self._after_call = not text
        self._has_content = self._has_content or bool(text.strip())
        self._delta.text += text

    def _scan_calls(self) -> Steps:
        if self._form.listed:
            _require((yield from self._visible()) == "[")
        another = True
        while another:
            self._closing = False
            yield from self._named_call() if self._form.divider else self._json_call()
            self._scanned, self._named = "", False
            self._closing = self._after_call = True
            another = yield from self._separator()
        self._closing = False

    def _separator(self) -> Generator[None, None, bool]:
        """Scans the format's own marker after a call. Returns whether it separates two calls."""
        form = self._form
        closers = (form.closer, "]") if form.listed else (form.closer,)
        while True:
            yield from self._next()
            scanned = self._scanned.lstrip()
            if scanned and scanned in (form.separator, *closers):
                self._scanned = ""
                return scanned == form.separator
            _require(form.closer.startswith(scanned))

    def _give_up(self) -> None:
        """Goes back to where the call began; its first marker or character is content. After a
        call, all is content."""
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
        """Scans weather[ARGS]{"city": "Paris"}. An id between the two is dropped. Nothing is
        emitted before the arguments begin."""
        head, form = (yield from self._visible()), self._form
        while not head.endswith(form.divider):
            head += yield from self._next()
            _require(len(head) <= MAX_HEAD)
        name = head.removesuffix(form.divider).partition(form.id_mark)[0].strip()
        first = yield from self._visible()
        _require(first == "{" and name in self._tools)
        self._emit_name(name)
        raw, _ = yield from self._value(first, streams=True)
        self._emit_arguments(raw[-1])

    def _value(
        self, character: str, *, streams: bool = False
    ) -> Generator[None, None, tuple[str, str]]:
        """Scans one JSON value from its first character. Returns it, and the character after it
        where only that ends it. Where it `streams`, all but its last character is emitted."""
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

    def _emit_name(self, name: str, arguments: str = "") -> None:
        self._delta.tool_calls += (ToolCallDelta(self._calls, self._new_id(), name),)
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
    except ValueError:
        raise Malformed from None


def held_back(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        start = text.find(marker[0], max(len(text) - len(marker) + 1, 0))
        while start >= 0 and len(text) - start > longest:
            if marker.startswith(text[start:]):
                longest = len(text) - start
            start = text.find(marker[0], start + 1)
    return longest

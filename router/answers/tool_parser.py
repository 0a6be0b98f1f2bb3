"""Finds tool calls in an answer's text, as it comes.

    saying ─opener─▶ before a call ─{─▶ within it ─}─▶ behind it ─▶ saying, or before the next
                          └──────────────┴─ no call after all: said, as it was written

Text that may be the beginning of a call is held back until that is decided.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from baton.router.answers.answer_events import ToolCallDelta
from baton.router.answers.call_reader import CallReader, Malformed, NamedCallReader
from baton.router.answers.parts import Parts, held_back
from baton.router.answers.tool_format import ToolFormat

_SPACE = " \t\r\n"


class _State(Enum):
    SAYING = auto()
    BEFORE = auto()  # the list's bracket, or the call
    WITHIN = auto()
    BEHIND = auto()  # the closer, a separator, or what comes after calls


class ToolCallParser:
    def __init__(self, form: ToolFormat, tools: Collection[str]) -> None:
        self._form = form
        self._tools = tools
        self._state = _State.SAYING
        self._held = ""  # not looked at yet
        self._read = ""  # looked at, and not told: a call that may be none
        self._said = False  # something other than white space
        self._in_list = False
        self._reader = self._new_reader()
        self._calls = 0  # whose name was told
        self._after_call = False  # nothing has been said since the last

    def _new_reader(self) -> CallReader | NamedCallReader:
        form = self._form
        if form.divider:
            return NamedCallReader(self._tools, form.divider, form.id_mark)
        return CallReader(self._tools)

    def push(self, text: str) -> Parts:
        self._held += text
        parts = Parts()
        while self._held:
            if self._state is not _State.SAYING:
                parts += self._take()
                continue
            parts += self._say()
            if self._state is _State.SAYING:
                break  # what is held back needs more text
        return parts

    def flush(self) -> Parts:
        """What was begun and is no call after all is said."""
        text, self._read, self._held = self._read + self._held, "", ""
        called = self._state is _State.BEHIND or (
            self._state is _State.WITHIN and bool(self._reader.name)
        )
        return Parts() if called else self._spoken(text)

    def _say(self) -> Parts:
        if self._form.bare and not self._said:
            begun = self._held.lstrip()
            if begun.startswith("{"):
                return self._open(len(self._held) - len(begun), 0)
            if not begun:
                return Parts()
        text, mark, _ = self._held.partition(self._form.opener)
        if mark:
            return self._open(len(text), len(mark))
        kept = len(text) - held_back(text, [self._form.opener])
        self._held = text[kept:]
        return self._spoken(text[:kept])

    def _open(self, start: int, length: int) -> Parts:
        """What is before `start` is said; `length` characters later calls begin."""
        spoken = self._spoken(self._held[:start])
        end = start + length
        self._read, self._held = self._held[start:end], self._held[end:]
        self._state, self._in_list = _State.BEFORE, False
        self._reader = self._new_reader()
        return spoken

    def _spoken(self, text: str) -> Parts:
        if self._after_call:
            text = text.lstrip()  # white space behind calls is no answer
            self._after_call = not text
        self._said = self._said or bool(text.strip())
        return Parts(text)

    def _take(self) -> Parts:
        character, self._held = self._held[0], self._held[1:]
        self._read += character
        try:
            match self._state:
                case _State.BEFORE:
                    return self._before(character)
                case _State.WITHIN:
                    return self._within(character)
                case _:
                    self._behind()
                    return Parts()
        except Malformed:
            return self._give_up()

    def _before(self, character: str) -> Parts:
        if character in _SPACE:
            return Parts()
        if self._form.listed and not self._in_list:
            if character != "[":
                raise Malformed
            self._in_list = True
            return Parts()
        self._state = _State.WITHIN
        return self._within(character)

    def _within(self, character: str) -> Parts:
        told = self._reader.push(character)
        pieces = []
        if told.name:
            pieces.append(ToolCallDelta(self._calls, self._form.new_id(), told.name))
            self._calls += 1
        if told.arguments:
            pieces.append(ToolCallDelta(self._calls - 1, arguments=told.arguments))
        if self._reader.name:
            self._read = ""
        if self._reader.done:
            self._state, self._after_call = _State.BEHIND, True
        return Parts(tool_calls=pieces)

    def _behind(self) -> None:
        """Only the form's own marks may follow a call; anything else is said."""
        form, read = self._form, self._read.lstrip()
        if not read:
            return
        if read == form.separator:
            self._read, self._state = "", _State.BEFORE
            self._reader = self._new_reader()
        elif read == form.closer or (self._in_list and read == "]"):
            self._read, self._state = "", _State.SAYING
        elif not form.closer.startswith(read):
            raise Malformed

    def _give_up(self) -> Parts:
        """Goes back to where the call began. The mark that misled is said."""
        text, self._read = self._read, ""
        misled = "" if self._state is _State.BEHIND else self._mark(text)
        self._state, self._said = _State.SAYING, True
        self._held = text[len(misled) :] + self._held
        return self._spoken(misled)

    def _mark(self, text: str) -> str:
        return self._form.opener if text.startswith(self._form.opener) else text[:1]

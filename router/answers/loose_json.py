"""JSON as Gemma writes it: {city:<|"|>Paris<|"|>,days:3}. Keys are bare, and strings are between
marks, as they are."""

from __future__ import annotations

import json

from baton.router.answers.argument_types import as_json
from baton.router.answers.splitters import held_back

_SIGNS = "{}[]:,"


class LooseJson:
    """Turns one object or list into JSON, character by character."""

    def __init__(self, quote: str) -> None:
        """`quote` is the mark before and after a string; JSON's own are read as well."""
        self._quote = quote
        self._end = ""  # of the string that is open
        self._held = ""
        self._depth = 0
        self.done = False

    def push(self, character: str) -> str:
        """The JSON that is sure with it."""
        self._held += character
        return self._in_string() if self._end else self._between()

    def _in_string(self) -> str:
        held, end = self._held, self._end
        if end == '"':
            # Written as in JSON: a backslash is held until the next character.
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
        if held[-1:] not in tuple(_SIGNS):
            return ""
        word, sign, self._held = held[:-1].strip(), held[-1], ""
        self._depth += (sign in "{[") - (sign in "}]")
        self.done = self._depth == 0
        if word:
            word = json.dumps(word, ensure_ascii=False) if sign == ":" else as_json(word, {})
        return word + sign


def escaped(text: str) -> str:
    """As within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]

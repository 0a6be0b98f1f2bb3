"""Follows a text that a sequence repeats, and finds it again after an edit.

    following ──a guess is wrong──▶ lost ──not found among WINDOW tokens──▶ dropped
        ▲                            │
        └──a guess is right behind───┘
           a token that is found again

An edit is what the answer has instead of a part of the text. It is guessed again when the text has
the same two tokens again: a name that is replaced throughout, a line break before every field.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from baton.engine.acceptance import MEMORY, PRIOR_WEIGHT
from baton.engine.token_index import LONG, TokenIndex

WINDOW = 16
"""A lost text is searched for within this many tokens of the text and of the sequence."""

SHORT_MATCH, MATCH, LONG_MATCH, RESUMED, SHIFTED, EDITED = range(6)
"""Kinds of guesses: three by the length of the match; two where the text was lost, after a token
that was found again or, if none was, one token further; and the first token of a repeated edit."""

LONG_LENGTH = 12

NOWHERE = 1 << 62
"""The place of a match that guesses nothing while it is lost."""


class Edit(NamedTuple):
    start: int  # in the sequence
    added: int  # tokens of the sequence
    skipped: int  # tokens of the text that they replace


class Match:
    """A place in the text: the `length` tokens before it equal the last ones of the sequence,
    `own`."""

    __slots__ = (
        "_compared",
        "_edit",
        "_edited",
        "_edits",
        "_found",
        "_lost",
        "_own",
        "_right",
        "_shift",
        "kind",
        "length",
        "place",
        "text",
    )

    def __init__(self, text: TokenIndex, place: int, length: int, own: TokenIndex) -> None:
        self.text = text
        self.place = place  # of the next guess
        self.length = length
        self.kind = self._kind(length)
        self._own = own
        self._right = self._compared = 0.0  # decayed counts
        self._edits: dict[tuple[int, int], Edit] = {}  # by the tokens of the text around its start
        self._edit: Edit | None = None  # the edit that is being guessed
        self._edited = 0  # its tokens so far
        self._lost: tuple[int, int] | None = None  # places in the text and in the sequence
        self._found: tuple[int, int] | None = None  # places from which they may be equal again
        self._shift = 1  # tokens of the text that one other token replaces; 0: it is inserted

    def next_guess(self) -> int | None:
        if self._edit:
            return self._own.tokens[self._edit.start + self._edited]
        text = self.text.tokens
        return text[self.place] if self.place < len(text) else None

    def guesses(self, most: int, stops: Container[int]) -> tuple[list[int], list[int]]:
        """At most `most` tokens, none from one of `stops` on, and their kinds. If the text is the
        sequence itself, its guesses follow its last token."""
        own, text, size = self._own.tokens, self.text.tokens, len(self.text.tokens)
        place, edit, edited, kind = self.place, self._edit, self._edited, self.kind
        guesses: list[int] = []
        kinds: list[int] = []
        for length in range(self.length + 1, self.length + 1 + most):
            if edit:
                token, edited = own[edit.start + edited], edited + 1
            elif place < size:
                token, place = text[place], place + 1
            elif text is own and place - size < len(guesses):
                token, place = guesses[place - size], place + 1
            else:
                break
            if token in stops:
                break
            guesses.append(token)
            kinds.append(kind)
            kind = LONG_MATCH if length >= LONG_LENGTH else self._kind(length)
            if edit:
                if edited == edit.added:  # no edit follows another
                    place, edit = place + edit.skipped, None
            elif self._edits and (edit := self._edit_at(place)):
                edited, kind = 0, EDITED
                if not edit.added:
                    place, edit = place + edit.skipped, None
        return guesses, kinds

    def take(self, token: int) -> bool:
        """Follows the sequence's next token; called before that is added. Returns False if the
        text is no longer followed."""
        guess, text = self.next_guess(), self.text.tokens
        if guess is not None:
            self._right = MEMORY * self._right + (guess == token)
            self._compared = MEMORY * self._compared + 1.0
        if guess == token:
            self._go_on()
        elif self._edit and not self._edited and text[self.place] == token:
            del self._edits[text[self.place - 1], token]  # the text is not edited here
            self._edit = None
            self._go_on()
        else:
            return self._lose(token)
        return self.text is self._own or self.place < len(text)

    def share(self, assumed: float) -> float:
        """The share of its guesses that are right; `assumed` is the share of their kind."""
        if self._lost:
            return assumed if self._found else 0.0
        return (PRIOR_WEIGHT * assumed + self._right) / (PRIOR_WEIGHT + self._compared)

    def _go_on(self) -> None:
        self.length += 1
        if self._lost and self._found:
            self._add_edit(self._lost, self._found)
            self._lost = self._found = None
        if self._edit:
            self._edited += 1
            self.kind = self._kind(self.length)
            if self._edited == self._edit.added:
                self.place += self._edit.skipped
                self._edit = None
            return
        self.place, self.kind = self.place + 1, self._kind(self.length)
        if edit := self._edit_at(self.place):
            self.kind, self._edited = EDITED, 0
            self._edit = edit if edit.added else None
            self.place += 0 if edit.added else edit.skipped

    def _add_edit(self, lost: tuple[int, int], found: tuple[int, int]) -> None:
        place, start = lost
        edit = Edit(start, found[1] - start, found[0] - place)
        if edit.added == 1 and edit.skipped <= 1:
            self._shift = edit.skipped
        if place:
            self._edits[self.text.tokens[place - 1], self.text.tokens[place]] = edit

    def _edit_at(self, place: int) -> Edit | None:
        text = self.text.tokens
        if not self._edits or place >= len(text):
            return None
        return self._edits.get((text[place - 1], text[place]))

    def _lose(self, token: int) -> bool:
        position, text = len(self._own.tokens), self.text.tokens
        if not self._lost:
            if self.length < LONG or self.place >= len(text):
                return False
            self._lost = self.place, position - (self._edited if self._edit else 0)
            self._edit = None
            self.length //= 2
        lost, start = self._lost
        if position - start >= WINDOW:
            return False
        if token in text[lost : lost + WINDOW]:
            self._found = text.index(token, lost), position
            self.place, self.kind = self._found[0] + 1, RESUMED
        elif position == start:
            self._found = lost + self._shift, position + 1
            self.place, self.kind = self._found[0], SHIFTED
        else:
            self._found, self.place = None, NOWHERE
        return True

    def _kind(self, length: int) -> int:
        if length < LONG:
            return SHORT_MATCH
        return MATCH if length < LONG_LENGTH else LONG_MATCH

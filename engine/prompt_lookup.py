"""Guesses the next tokens of a sequence: what followed the same tokens before, in its prompt or
its answer.

An index has the latest place behind each run of two and of four tokens. A match that goes on is
followed token by token, so it grows without a search. Keys are hashes: a collision costs a wrong
guess, and a wrong guess costs time alone.

Each token that comes is compared with the one guessed for it, whether or not that was run. So the
chance of a guess is known without trying, by the length of its match.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

LONG, SHORT = 4, 2
"""Tokens that must be equal for a match; a long one is looked for first."""

MOST_INDEXED = 1 << 14
"""Of a prompt, the last tokens that are indexed at first."""

MEMORY = 0.94
"""What a comparison counts for after each further one of its kind."""

PRIORS = ((4, 0.3), (12, 0.6), (1 << 30, 0.85))
"""By the length of a match up to these: the share of right guesses that is assumed at first."""
PRIOR_WEIGHT = 2.0

_FACTOR = 0x9E3779B1


class PromptLookup:
    """Of one sequence; `tokens` is its own list, which grows."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._index = _indexed(tokens)
        self._place: int | None = None  # of the token guessed to come next
        self._length = 0  # of the match before it
        self._right = [PRIOR_WEIGHT * share for _, share in PRIORS]
        self._compared = [PRIOR_WEIGHT] * len(PRIORS)
        self._known = max(0, len(tokens) - 1)  # tokens that the index has seen
        self.follow()

    def follow(self) -> None:
        """Takes over what was added to the tokens."""
        for position in range(self._known, len(self._tokens)):
            if self._place is not None:
                self._compare(self._tokens[position])
            self._advance(position)
            self._known = position + 1

    def guess(self, most: int) -> list[int]:
        """At most `most` tokens. Where a match reaches the end, what it repeats is repeated."""
        if self._place is None or most < 1:
            return []
        found = self._tokens[self._place : self._place + most]
        period = len(found)
        while len(found) < most:
            found.append(found[-period])
        return found

    def chances(self, count: int) -> Iterator[float]:
        """For each of `count` guesses, that it and all before it are right."""
        chance = 1.0
        for length in range(self._length, self._length + count):
            kind = _kind(length)
            chance *= self._right[kind] / self._compared[kind]
            yield chance

    def _compare(self, token: int) -> None:
        assert self._place is not None
        kind, right = _kind(self._length), self._tokens[self._place] == token
        self._right[kind] = MEMORY * self._right[kind] + right
        self._compared[kind] = MEMORY * self._compared[kind] + 1.0
        self._place = self._place + 1 if right else None
        self._length += 1

    def _advance(self, position: int) -> None:
        """Adds the runs that end with the token at `position`, and looks for them before."""
        place = None
        for size in (LONG, SHORT):
            if position + 1 >= size:
                key = _key(self._tokens[position + 1 - size : position + 1])
                before = self._index.get(key)
                self._index[key] = position + 1
                if place is None and before is not None:
                    place, length = before, size
        if self._place is None and place is not None:
            self._place, self._length = place, length


def _indexed(tokens: list[int]) -> dict[int, int]:
    """The place behind each run but those that end with the last token."""
    start = max(0, len(tokens) - MOST_INDEXED)
    ids = np.asarray(tokens[start:-1], dtype=np.int64)
    index: dict[int, int] = {}
    for size in (SHORT, LONG):
        keys = np.zeros(max(0, len(ids) - size + 1), dtype=np.int64)
        for offset in range(size):
            keys = keys * _FACTOR + ids[offset : offset + len(keys)]
        index.update(
            zip((keys * LONG + size).tolist(), range(start + size, len(tokens)), strict=True)
        )
    return index


def _key(run: list[int]) -> int:
    """As in `_indexed`, whose 64 bits wrap."""
    key = 0
    for token in run:
        key = key * _FACTOR + token
    key = key * LONG + len(run) & (1 << 64) - 1
    return key - (1 << 64) if key >> 63 else key


def _kind(length: int) -> int:
    return next(kind for kind, (longest, _) in enumerate(PRIORS) if length < longest)

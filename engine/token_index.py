"""An index of runs of two and of four tokens: the place after the latest run of each.

Keys are hashes: a collision finds a wrong place, which costs no more than a wrong guess.
"""

from __future__ import annotations

import numpy as np

LONG, SHORT = 4, 2
"""Lengths of indexed runs."""

_FACTOR = 0x9E3779B1


class TokenIndex:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens: list[int] = []
        self._places: dict[int, int] = {}
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        overlap = min(LONG - 1, len(self.tokens))
        start = len(self.tokens) - overlap
        self.tokens += tokens
        ids = np.asarray(self.tokens[start:], dtype=np.uint64)
        for size in (SHORT, LONG):
            keys = np.zeros(max(0, len(ids) - size + 1), dtype=np.uint64)
            for offset in range(size):
                keys = keys * _FACTOR + ids[offset : offset + len(keys)]
            places = range(start + size, start + size + len(keys))
            self._places.update(zip((keys * LONG + size).tolist(), places, strict=True))

    def find(self, key: int) -> int | None:
        return self._places.get(key)

    def append(self, token: int, keys: list[tuple[int, int]]) -> None:
        """`keys`: `last_runs` of the token."""
        self.tokens.append(token)
        for _, key in keys:
            self._places[key] = len(self.tokens)


def last_runs(tokens: list[int], token: int) -> list[tuple[int, int]]:
    """Size and key of each run that ends with `token` after `tokens`, the longest first."""
    if not tokens:
        return []
    last = tokens[-1] * _FACTOR + token
    runs = [(SHORT, _key(last, SHORT))]
    if len(tokens) >= LONG - 1:
        first = tokens[-3] * _FACTOR + tokens[-2]
        runs.insert(0, (LONG, _key(first * _FACTOR**SHORT + last, LONG)))
    return runs


def _key(number: int, size: int) -> int:
    """The key as in `extend`, whose 64 bits wrap."""
    return number * LONG + size & (1 << 64) - 1

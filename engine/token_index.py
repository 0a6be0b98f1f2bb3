"""Where runs of tokens stood: the place behind the latest run of each two and of each four.

Keys are hashes: a collision finds a wrong place, which costs a wrong guess and no more.
"""

from __future__ import annotations

import numpy as np

LONG, SHORT = 4, 2
"""Tokens that must be equal for a match."""

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
        ids = np.asarray(self.tokens[start:], dtype=np.int64)
        for size in (SHORT, LONG):
            keys = np.zeros(max(0, len(ids) - size + 1), dtype=np.int64)
            for offset in range(size):
                keys = keys * _FACTOR + ids[offset : offset + len(keys)]
            places = range(start + size, start + size + len(keys))
            self._places.update(zip((keys * LONG + size).tolist(), places, strict=True))

    def find(self, key: int) -> int | None:
        return self._places.get(key)

    def append(self, token: int, keys: list[tuple[int, int]]) -> None:
        """`keys` are those of the runs that end with the token."""
        self.tokens.append(token)
        for _, key in keys:
            self._places[key] = len(self.tokens)


def last_runs(tokens: list[int], token: int) -> list[tuple[int, int]]:
    """Size and key of each run that ends with `token` behind `tokens`, the longest first."""
    sizes = [size for size in (LONG, SHORT) if size <= len(tokens) + 1]
    return [(size, _key([*tokens[len(tokens) + 1 - size :], token])) for size in sizes]


def _key(run: list[int]) -> int:
    """As in `extend`, whose 64 bits wrap."""
    key = 0
    for token in run:
        key = key * _FACTOR + token
    key = key * LONG + len(run) & (1 << 64) - 1
    return key - (1 << 64) if key >> 63 else key

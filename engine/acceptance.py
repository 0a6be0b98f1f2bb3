"""Tracks the share of right guesses by kind of guess, to predict the next ones."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

PRIOR_WEIGHT = 2.0
MEMORY, LONG_MEMORY = 0.94, 0.99
"""Decay of a comparison's weight with each later one of its kind: for its sequence, and for
sequences that begin later."""


class Offer(NamedTuple):
    """Guesses of a request, and for each the chance that it and all before it are right."""

    guesses: list[int]
    chances: list[float]


class Acceptance:
    """Begins with `shares`, one for each kind."""

    def __init__(self, shares: Sequence[float], before: Acceptance | None = None) -> None:
        self._before = before
        self._memory = MEMORY if before else LONG_MEMORY
        self._right = [PRIOR_WEIGHT * share for share in shares]
        self._compared = [PRIOR_WEIGHT] * len(shares)

    def of_sequence(self) -> Acceptance:
        """Returns one for a new sequence. It begins with the shares of this one and updates them
        too."""
        return Acceptance(self._shares(), self)

    def share(self, kind: int) -> float:
        return self._right[kind] / self._compared[kind]

    def chances(self, kinds: list[int]) -> list[float]:
        """The probability, for each guess, that it and all before it are right."""
        return list(accumulate(map(self._shares().__getitem__, kinds), operator.mul))

    def _shares(self) -> list[float]:
        return list(map(operator.truediv, self._right, self._compared))

    def note(self, kind: int, *, right: bool) -> None:
        self._right[kind] = self._memory * self._right[kind] + right
        self._compared[kind] = self._memory * self._compared[kind] + 1.0
        if self._before:
            self._before.note(kind, right=right)

"""Shares of right guesses, by kind of guess: what a guesser expects of its next ones."""

from __future__ import annotations

from collections.abc import Sequence

PRIOR_WEIGHT = 2.0
MEMORY, LONG_MEMORY = 0.94, 0.99
"""What a comparison counts for after each further one of its kind: for its sequence, and for the
sequences that begin later."""


class Acceptance:
    """Begins with `shares`, one a kind."""

    def __init__(self, shares: Sequence[float], before: Acceptance | None = None) -> None:
        self._before = before
        self._memory = MEMORY if before else LONG_MEMORY
        self._right = [PRIOR_WEIGHT * share for share in shares]
        self._compared = [PRIOR_WEIGHT] * len(shares)

    def of_sequence(self) -> Acceptance:
        """Begins with what this one has seen, and adds to that."""
        return Acceptance(list(map(self.share, range(len(self._right)))), self)

    def share(self, kind: int) -> float:
        return self._right[kind] / self._compared[kind]

    def note(self, kind: int, *, right: bool) -> None:
        self._right[kind] = self._memory * self._right[kind] + right
        self._compared[kind] = self._memory * self._compared[kind] + 1.0
        if self._before:
            self._before.note(kind, right=right)

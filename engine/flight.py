"""A step that has been launched, and may still be running."""

from __future__ import annotations

from typing import Protocol

from core.errors import BatonError

Outcome = int | BatonError | None
"""What a step did for one piece: sampled a token, failed it, or just computed it."""


class Flight(Protocol):
    def wait(self) -> list[Outcome]:
        """What the step did for each piece, in the plan's order. Returns when it has ended.

        Called once. The tokens are the caller's to append, before it plans another step.
        """


class Landed:
    """A step that had ended when its launch returned."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self._outcomes = outcomes

    def wait(self) -> list[Outcome]:
        return self._outcomes

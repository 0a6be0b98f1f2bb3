"""A step that has been launched, and may still be running."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from baton.core.errors import BatonError
from baton.core.types import DeviceEvent, Logprobs


class Scored(NamedTuple):
    """A sampled token of a sequence that wants to know how likely its tokens are."""

    token: int
    logprobs: Logprobs


Outcome = int | Scored | BatonError | None
"""What a step did for one piece: sampled a token, failed it, or just computed it."""


class Flight(Protocol):
    @property
    def ended(self) -> DeviceEvent | None:
        """When the device has done it; None where it was done when its launch returned."""

    def wait(self) -> list[Outcome]:
        """What the step did for each piece, in the plan's order. Returns when it has ended.

        Called once. The tokens are the caller's to append, before it plans another step.
        """


class Landed:
    """A step that had ended when its launch returned."""

    ended: DeviceEvent | None = None

    def __init__(self, outcomes: list[Outcome]) -> None:
        self._outcomes = outcomes

    def wait(self) -> list[Outcome]:
        return self._outcomes

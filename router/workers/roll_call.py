"""Whether a worker has answered since another one was lost.

    present ─another is lost─▶ questioned ─the answer to a ping that was sent then─▶ present

A host that goes takes all its workers along, and a router sees one of them go after the other:
by streams that break, or by pings that stay unanswered. A request that has lost a worker there
must not go to the next that is gone already, and be taken for what has killed both.
"""

from __future__ import annotations


class RollCall:
    """Answers come in the order of the pings, so counting tells them apart."""

    def __init__(self) -> None:
        self._pings = 0
        self._answers = 0
        self._wanted = 0  # answers

    @property
    def present(self) -> bool:
        return self._answers >= self._wanted

    def ping(self) -> None:
        """One was sent."""
        self._pings += 1

    def question(self) -> None:
        """The ping that was sent last is to be answered."""
        self._wanted = self._pings

    def answer(self) -> bool:
        """An answer came; whether it was the one that was waited for."""
        before = self.present
        self._answers += 1
        return self.present and not before

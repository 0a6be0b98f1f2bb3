"""What the members have told of themselves, and who has fallen silent.

Each tells once a second, but for while it starts. One that has served and is silent is lost or
frozen, or waits for a place to start again. Routers keep it, since they see for themselves whether
it answers; but it does not serve, to operators and to whoever chooses the workers that can be
spared.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from baton.cluster.member import Member

SILENT_SECONDS = 10.0
"""Without a word, after which a member does not count as serving."""

SILENT = "silent: lost, frozen, or waiting for a place"
"""The progress of such a member."""


class Census:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._heard: dict[str, float] = {}

    def note(self, member: Member) -> Member | None:
        """A member tells; what it told before."""
        before = self._members.get(member.worker_id)
        self._members[member.worker_id] = member
        self._heard[member.worker_id] = self._clock()
        return before

    def forget(self, name: str) -> None:
        self._members.pop(name, None)
        self._heard.pop(name, None)

    def find(self, name: str) -> Member | None:
        """As it told last."""
        return self._members.get(name)

    @property
    def names(self) -> set[str]:
        return set(self._members)

    @property
    def told(self) -> list[Member]:
        """Everyone, as they told last."""
        return list(self._members.values())

    @property
    def now(self) -> list[Member]:
        """Everyone; those that are silent are nowhere."""
        return [
            dataclasses.replace(member, progress=SILENT, address="")
            if member.address and not self.serves(name)
            else member
            for name, member in self._members.items()
        ]

    def serves(self, name: str) -> bool:
        member = self._members.get(name)
        silent = self._clock() - self._heard.get(name, 0.0) > SILENT_SECONDS
        return bool(member and member.address) and not silent

    def requests(self, name: str) -> int:
        """How many a worker has, running or waiting, as far as is known."""
        member = self._members.get(name)
        return member.requests if member else 0

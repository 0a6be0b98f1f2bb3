"""The workers that a cluster is to have, by name.

    wanted ─scaled down─▶ retiring ─drained─▶ forgotten
       └─drained by an operator─▲

What is decided here, the controller carries out. A pool's wanted number is the
count of its wanted workers, so there is nothing that could disagree with it: a
worker that changes its role changes both pools' numbers, and one that an
operator drains is wanted no more. Names are given once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from baton.core.types import Role
from baton.planner.sizing import NONE, Pools


@dataclass(frozen=True, slots=True)
class Fleet:
    """A value: each method gives another one."""

    workers: Mapping[str, Role]
    # Of the workers, those that are wanted no more and still finish what they run.
    retiring: frozenset[str] = frozenset()
    # How many names of each role have been given, ever.
    named: Pools = NONE

    @classmethod
    def of(cls, wanted: Pools) -> Fleet:
        return cls({}).scaled(wanted)

    @property
    def wanted(self) -> Pools:
        count = Counter(role for name, role in self.workers.items() if name not in self.retiring)
        return Pools(count[Role.PREFILL], count[Role.DECODE])

    def scaled(self, wanted: Pools, spare: Sequence[str] = ()) -> Fleet:
        """With so many workers. Where these are fewer, those that are first in `spare` retire."""
        fleet = self
        for role in (Role.PREFILL, Role.DECODE):
            fleet = fleet._grown(role, wanted.of(role) - fleet.wanted.of(role))
            fleet = fleet._shrunk(role, fleet.wanted.of(role) - wanted.of(role), spare)
        return fleet

    def switched(self, name: str, role: Role) -> Fleet:
        """The worker has taken up another role."""
        return replace(self, workers={**self.workers, name: role})

    def retired(self, name: str) -> Fleet:
        """The worker is wanted no more, and still finishes what it runs."""
        return replace(self, retiring=self.retiring | {name})

    def without(self, name: str) -> Fleet:
        """The worker has ended, and is not to come back."""
        workers = {other: role for other, role in self.workers.items() if other != name}
        return replace(self, workers=workers, retiring=self.retiring - {name})

    def _grown(self, role: Role, count: int) -> Fleet:
        first = self.named.of(role)
        new = {f"{role.value}-{index}": role for index in range(first, first + count)}
        named = self.named.with_more(role, len(new))
        return replace(self, workers={**self.workers, **new}, named=named)

    def _shrunk(self, role: Role, count: int, spare: Sequence[str]) -> Fleet:
        able = [name for name in spare if self.workers.get(name) is role]
        going = [name for name in able if name not in self.retiring][: max(0, count)]
        return replace(self, retiring=self.retiring.union(going))


def dump(fleet: Fleet) -> str:
    """As text that `parse` reads back."""
    return json.dumps(
        {
            "workers": {name: role.value for name, role in fleet.workers.items()},
            "retiring": sorted(fleet.retiring),
            "named": list(fleet.named),
        }
    )


def parse(text: str | bytes) -> Fleet:
    tree = json.loads(text)
    workers = {name: Role(role) for name, role in tree["workers"].items()}
    return Fleet(workers, frozenset(tree["retiring"]), Pools(*tree["named"]))

"""Compares the planner's changes, live and in the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.planner.simulation_report import TimedDecision
from baton.planner.sizing import NOTHING, WANTED, Pools
from baton.v1 import cluster_pb2


@dataclass(frozen=True, slots=True)
class Change:
    """A decision to change something, whether it succeeded or not."""

    seconds: float  # since the first request was due
    words: str
    have: Pools
    reasons: Sequence[str] = ()

    @property
    def done(self) -> str:
        """The changes that succeeded; empty when none did."""
        parts = self.words.removeprefix(NOTHING).split(", ")
        return ", ".join(part for part in parts if not part.endswith(WANTED))


def live_change(made: cluster_pb2.PlannedRound, began_at: float) -> Change:
    have = Pools(made.have_prefill, made.have_decode)
    return Change(made.at - began_at, made.summary, have, made.reasons)


def simulated_change(planned: TimedDecision) -> Change:
    decision = planned.decision
    return Change(planned.seconds, decision.summary, decision.have, decision.reasons)


def agreement(live: Sequence[Change], simulated: Sequence[Change]) -> str:
    """Says whether both made the same changes in the same order, and how far apart in time."""
    one, other = ([each for each in changes if each.done] for changes in (live, simulated))
    if [each.done for each in one] != [each.done for each in other]:
        return "the changes are NOT the same"
    apart = [abs(a.seconds - b.seconds) for a, b in zip(one, other, strict=True)]
    if not apart:
        return "the same: nothing was changed"
    return f"the same changes in the same order: {len(apart)}, at most {max(apart):.1f} s apart"


def print_changes(title: str, changes: Sequence[Change]) -> None:
    print(f"{title}:")
    for each in changes:
        have = f"{each.have.prefill} + {each.have.decode} workers"
        print(f"  {each.seconds:>6.1f} s  {each.words}  ({have})")
        for reason in each.reasons:
            print(f"            {reason}")

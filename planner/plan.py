"""Decides how many workers each pool should have: a pure function of what was observed.

    need     the fewest workers that keep the objectives (planner/queueing.py)
    short    a pool that has fewer: the other one's spare workers change their role; for what
             is still missing, new workers are asked for
    spare    a pool that would keep the objectives with fewer even if its load grew by
             `headroom`; nobody being short, they are drained, once that has lasted for
             `patience` rounds

A pool so grows at once and shrinks late, and what lies between need and spare is left alone:
a load that goes up and down a little changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.types import Role
from planner.observation import Goals, Observation
from planner.pools import NONE, Pools, other
from planner.queueing import decode_workers, late_share, prefill_workers


@dataclass(frozen=True, slots=True)
class Switch:
    """Workers that take up another role, once they have drained."""

    to: Role
    count: int


@dataclass(frozen=True, slots=True)
class PlannerState:
    """What is remembered from one round to the next."""

    # For how many rounds each pool has had spare workers, and how many at the least.
    rounds: Pools = NONE
    spare: Pools = NONE


@dataclass(frozen=True, slots=True)
class Decision:
    need: Pools
    have: Pools
    switch: Switch | None = None
    add: Pools = NONE
    drain: Pools = NONE
    # Workers that are needed, and that there is no room for.
    missing: int = 0
    # Why, with the numbers.
    reasons: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        return self.switch is not None or self.add != NONE or self.drain != NONE

    @property
    def words(self) -> str:
        """What is done, in a few words."""
        done = []
        if self.switch:
            role = self.switch.to
            done.append(f"switch {self.switch.count} from {other(role)} to {role}")
        for role in Role:
            if count := self.add.of(role):
                done.append(f"add {count} {role}")
            if count := self.drain.of(role):
                done.append(f"drain {count} {role}")
        if self.missing:
            done.append(f"{self.missing} more needed than allowed")
        return ", ".join(done) or "no change"


def plan(seen: Observation, state: PlannerState, goals: Goals) -> tuple[Decision, PlannerState]:
    """What to do now, and what to remember."""
    if not seen.window.seconds:
        return Decision(seen.have, seen.have, reasons=("nothing has been measured yet",)), state
    need, reasons = _need(seen, goals)
    comfortable, _ = _need(seen, goals, goals.headroom)
    short, spare = need.beyond(seen.have), seen.have.beyond(comfortable)
    if short.total:
        return _grow(seen, goals, need, short, spare, reasons), PlannerState()
    state = _remember(state, spare)
    drain = Pools(
        *(
            state.spare.of(role) if state.rounds.of(role) >= goals.patience else 0
            for role in (Role.PREFILL, Role.DECODE)
        )
    )
    if drain.total:
        reasons += (_spare_reason(drain, goals),)
        state = PlannerState()
    return Decision(need, seen.have, drain=drain, reasons=reasons), state


def _grow(
    seen: Observation,
    goals: Goals,
    need: Pools,
    short: Pools,
    spare: Pools,
    reasons: tuple[str, ...],
) -> Decision:
    switch, add, missing = None, NONE, 0
    room = max(0, goals.most_workers - seen.have.total)
    for role in (Role.PREFILL, Role.DECODE):
        wanted = short.of(role)
        if moved := min(wanted, spare.of(other(role))):
            switch = Switch(role, moved)
            reasons += (f"{other(role)} can spare {spare.of(other(role))}",)
        added = min(wanted - moved, room - add.total)
        add = add.with_more(role, added)
        missing += wanted - moved - added
    if missing:
        reasons += (f"{goals.most_workers} workers are allowed, {missing} more are needed",)
    return Decision(need, seen.have, switch, add, missing=missing, reasons=reasons)


def _remember(state: PlannerState, spare: Pools) -> PlannerState:
    rounds, least = NONE, NONE
    for role in (Role.PREFILL, Role.DECODE):
        if now := spare.of(role):
            before = state.rounds.of(role)
            rounds = rounds.with_more(role, before + 1)
            least = least.with_more(role, min(now, state.spare.of(role)) if before else now)
    return PlannerState(rounds, least)


def _need(seen: Observation, goals: Goals, times: float = 1.0) -> tuple[Pools, tuple[str, ...]]:
    """With so many times the load; and the numbers that say so."""
    if not seen.window.requests or not seen.window.compute_seconds:
        return goals.least, ("no request came that could be served",)
    prefill, why_prefill = _prefill_need(seen, goals, times)
    decode, why_decode = _decode_need(seen, goals, times)
    need = Pools(max(prefill, goals.least.prefill), max(decode, goals.least.decode))
    return need, (why_prefill, why_decode)


def _prefill_need(seen: Observation, goals: Goals, times: float) -> tuple[int, str]:
    load = seen.prefill_load(times)
    limit = goals.ttft - seen.overhead_seconds
    workers = prefill_workers(load, limit, goals.late)
    late = late_share(load, workers, limit)
    backlog = f" and a backlog of {seen.queued_seconds:.1f} s" if load.backlog else ""
    return workers, (
        f"prefill: {load.rate:.2f} prompts/s of {load.mean_seconds:.3f} s each{backlog} keep"
        f" {load.busy:.1f} workers busy; with {workers}, {1 - late:.1%} would have their first"
        f" token within {goals.ttft:g} s"
    )


def _decode_need(seen: Observation, goals: Goals, times: float) -> tuple[int, str]:
    load = seen.decode_load(times)
    workers = decode_workers(load, goals.itl, seen.max_batch, seen.pool_pages)
    batch = load.batch(workers)
    waiting = f" and {load.waiting} that wait" if load.waiting else ""
    largest = load.largest_batch(goals.itl, seen.max_batch, seen.pool_pages)
    return workers, (
        f"decode: {load.rate:.2f} answers/s of {load.answer_tokens:.0f} tokens{waiting} are"
        f" batches of {batch:.1f} on {workers} workers, {1e3 * load.seconds(batch):.1f} ms a step;"
        f" up to {largest:.0f} keep to {1e3 * goals.itl:g} ms and fit"
    )


def _spare_reason(drain: Pools, goals: Goals) -> str:
    return (
        f"{drain.total} could be spared at {goals.headroom:g} times the load, for"
        f" {goals.patience} rounds"
    )

"""Decides how many workers each pool should have: a pure function of what was observed.

    need     the fewest workers that keep the objectives (planner/queueing.py)
    short    a pool that has fewer: the other one's spare workers change their role; for what
             is still missing, new workers are asked for
    spare    a pool that would keep the objectives with fewer even if its load grew by
             `headroom`; nobody being short, they are drained, once that has lasted for
             `patience` rounds
    regret   a pool that has to grow again soon after it gave workers up waits twice as long
             the next time, and half as long again once that has gone well

A pool so grows at once and shrinks late, and what lies between need and spare is left alone:
a load that goes up and down a little changes nothing. Peaks that come again and again at
longer intervals than `patience` are found out by regret: the wait grows until it outlasts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.core.types import Role
from baton.planner.observation import Goals, Observation
from baton.planner.pools import NONE, ONE_EACH, Pools, other
from baton.planner.queueing import decode_workers, late_share, prefill_workers

REGRET_TIMES = 4
"""Of the wait before workers are given up: how long after that it still counts as too early."""

MOST_CAUTION = 16

NOTHING = "no change"
WANTED = "more needed than allowed"


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
    # How many times `patience` each pool waits, and the rounds since it last gave workers up;
    # 0 when that is long ago.
    caution: Pools = ONE_EACH
    since: Pools = NONE


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

    def is_news(self, missing_before: int) -> bool:
        """Whether something is done, or other than a round before cannot be."""
        return self.changes or self.missing != missing_before

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
            done.append(f"{self.missing} {WANTED}")
        return ", ".join(done) or NOTHING


def plan(seen: Observation, state: PlannerState, goals: Goals) -> tuple[Decision, PlannerState]:
    """What to do now, and what to remember."""
    if not seen.window.seconds:
        return Decision(seen.have, seen.have, reasons=("nothing has been measured yet",)), state
    need, reasons = _need(seen, goals)
    comfortable, _ = _need(seen, goals, goals.headroom)
    short, spare = need.beyond(seen.have), seen.have.beyond(comfortable)
    state = _judge(state, short, goals)
    if short.total:
        decision = _grow(seen, goals, need, short, spare, reasons)
        return decision, _forget(state, _given(decision))
    state = _remember(state, spare)
    drain = _each(
        lambda role: (
            state.spare.of(role) if state.rounds.of(role) >= _wait(state, role, goals) else 0
        )
    )
    if drain.total:
        reasons += _spare_reasons(drain, state, goals)
        state = _forget(state, drain)
    return Decision(need, seen.have, drain=drain, reasons=reasons), state


def _each(value: Callable[[Role], int]) -> Pools:
    return Pools(value(Role.PREFILL), value(Role.DECODE))


def _wait(state: PlannerState, role: Role, goals: Goals) -> int:
    """Rounds for which workers must have been spare before they are given up."""
    return goals.patience * state.caution.of(role)


def _judge(state: PlannerState, short: Pools, goals: Goals) -> PlannerState:
    """Whether workers that were given up are missed."""

    def caution(role: Role) -> int:
        now, since = state.caution.of(role), state.since.of(role)
        if since and short.of(role):
            return min(2 * now, MOST_CAUTION)
        return max(1, now // 2) if since > REGRET_TIMES * _wait(state, role, goals) else now

    def since(role: Role) -> int:
        past = state.since.of(role)
        over = short.of(role) or past > REGRET_TIMES * _wait(state, role, goals)
        return past + 1 if past and not over else 0

    return replace(state, caution=_each(caution), since=_each(since))


def _forget(state: PlannerState, given: Pools) -> PlannerState:
    """After a change; `given` are the workers that each pool gives up with it."""
    since = _each(lambda role: 1 if given.of(role) else state.since.of(role))
    return PlannerState(caution=state.caution, since=since)


def _given(decision: Decision) -> Pools:
    switch = decision.switch
    return NONE.with_more(other(switch.to), switch.count) if switch else NONE


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
    return replace(state, rounds=rounds, spare=least)


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
        f" {load.work:.1f} workers busy; with {workers}, {1 - late:.1%} would have their first"
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


def _spare_reasons(drain: Pools, state: PlannerState, goals: Goals) -> tuple[str, ...]:
    return tuple(
        f"{role} could spare {drain.of(role)} at {goals.headroom:g} times the load, for"
        f" {_wait(state, role, goals)} rounds"
        for role in Role
        if drain.of(role)
    )

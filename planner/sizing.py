"""Decides how many workers each pool should have: a pure function of an observation.

    need     the fewest workers that meet the objectives (planner/queueing.py)
    short    a pool that has fewer: the other pool's spare workers switch roles; new workers
             are requested for the rest
    spare    workers without which a pool would meet the objectives at `headroom` times its load;
             while no pool is short, they are drained after `patience` rounds
    regret   a pool that must grow again soon after it gave workers up waits twice as long
             the next time, and half as long again once that has gone well

So a pool grows at once and shrinks late, and small changes of the load change nothing. If peaks
recur at intervals longer than `patience`, the wait doubles until it is longer than the intervals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from baton.core.types import Role
from baton.planner.queueing import (
    DecodeLoad,
    PrefillLoad,
    decode_workers,
    late_share,
    prefill_workers,
)
from baton.planner.traffic_window import Window
from baton.router.placement.cost_model import Costs

RECOVERY_SECONDS = 30.0
"""The time in which a backlog should be worked off."""

REGRET_TIMES = 4
"""Multiple of a pool's wait: a pool that does not grow for so long after it gave up workers did
not give them up too early."""

MOST_CAUTION = 16

NOTHING = "no change"
WANTED = "more needed than allowed"


class Pools(NamedTuple):
    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def of(self, role: Role) -> int:
        return self.prefill if role is Role.PREFILL else self.decode

    def beyond(self, other: Pools) -> Pools:
        """Subtracts each number, down to 0."""
        return Pools(*(max(0, one - two) for one, two in zip(self, other, strict=True)))

    def with_more(self, role: Role, count: int) -> Pools:
        if role is Role.PREFILL:
            return Pools(self.prefill + count, self.decode)
        return Pools(self.prefill, self.decode + count)


NONE = Pools(0, 0)
ONE_EACH = Pools(1, 1)


def other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


@dataclass(frozen=True, slots=True)
class Goals:
    """The objectives, and the limits for the pools."""

    # Seconds to the first token, and between two tokens.
    ttft: float
    itl: float
    # Workers of both pools together.
    most_workers: int
    # Share of the requests that may miss an objective.
    late: float = 0.02
    least: Pools = ONE_EACH
    # A pool gives up workers if it could serve this multiple of its load without them
    headroom: float = 1.25
    # for this number of rounds.
    patience: int = 30


@dataclass(frozen=True, slots=True)
class Observation:
    have: Pools
    """Workers that serve or soon will: starting and switching ones count in their next pool,
    draining ones do not count."""
    window: Window = field(default_factory=Window)
    # Measured costs.
    costs: Costs = field(default_factory=Costs)
    max_batch: int = 256
    pool_pages: int = 2**31
    # From a request's arrival to its first token, without waits and compute.
    overhead_seconds: float = 0.0
    # Compute of queued prompts, in seconds.
    queued_seconds: float = 0.0
    # Requests that wait for decode workers, there or in a router.
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Switch:
    """Workers that switch roles once they have drained."""

    to: Role
    count: int


@dataclass(frozen=True, slots=True)
class PoolState:
    """A pool's state between rounds."""

    # Consecutive rounds with spare workers, and the fewest in any of them.
    rounds: int = 0
    spare: int = 0
    # The multiple of `patience` that the pool waits.
    caution: int = 1
    # Rounds since it last gave up workers; 0 if that is long ago.
    since: int = 0

    def wait(self, goals: Goals) -> int:
        """Rounds for which workers must be spare before they are given up."""
        return goals.patience * self.caution

    def to_drain(self, goals: Goals) -> int:
        return self.spare if self.rounds >= self.wait(goals) else 0

    def judge(self, short: int, goals: Goals) -> PoolState:
        """Adjusts caution: raises it if workers are missing soon after some were given up."""
        if self.since and short:
            return replace(self, caution=min(2 * self.caution, MOST_CAUTION), since=0)
        if self.since > REGRET_TIMES * self.wait(goals):
            return replace(self, caution=max(1, self.caution // 2), since=0)
        return replace(self, since=self.since + 1) if self.since else self

    def remember(self, spare: int) -> PoolState:
        if not spare:
            return replace(self, rounds=0, spare=0)
        least = min(spare, self.spare) if self.rounds else spare
        return replace(self, rounds=self.rounds + 1, spare=least)

    def forget(self, given: int) -> PoolState:
        """Resets the count of spare rounds after a change with which this pool gives up `given`
        workers."""
        return PoolState(caution=self.caution, since=1 if given else self.since)


class PlannerState(NamedTuple):
    prefill: PoolState = PoolState()
    decode: PoolState = PoolState()

    def next(self, step: Callable[[PoolState, int], PoolState], numbers: Pools) -> PlannerState:
        """Applies a step to each pool's state, with the pool's number."""
        return PlannerState(*map(step, self, numbers))


@dataclass(frozen=True, slots=True)
class Decision:
    need: Pools
    have: Pools
    switch: Switch | None = None
    add: Pools = NONE
    drain: Pools = NONE
    # Workers needed beyond the limit.
    missing: int = 0
    # Sentences with numbers.
    reasons: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        return self.switch is not None or self.add != NONE or self.drain != NONE

    def is_news(self, missing_before: int) -> bool:
        """True if a pool or the number of missing workers changes."""
        return self.changes or self.missing != missing_before

    @property
    def summary(self) -> str:
        """The decision in a few words."""
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
    """Returns the decision, and the state for the next round."""
    if not seen.window.seconds:
        return Decision(seen.have, seen.have, reasons=("nothing has been measured yet",)), state
    need, reasons = _need(seen, goals)
    comfortable, _ = _need(seen, goals, goals.headroom)
    short, spare = need.beyond(seen.have), seen.have.beyond(comfortable)
    state = state.next(lambda pool, missing: pool.judge(missing, goals), short)
    if short.total:
        decision = _grow(seen, goals, need, short, spare, reasons)
        given, switch = NONE, decision.switch
        if switch:
            given = NONE.with_more(other(switch.to), switch.count)
        return decision, state.next(PoolState.forget, given)
    state = state.next(PoolState.remember, spare)
    drain = Pools(*(pool.to_drain(goals) for pool in state))
    if drain.total:
        reasons += tuple(
            f"{role} could spare {count} at {goals.headroom:g} times the load, for"
            f" {pool.wait(goals)} rounds"
            for role, count, pool in zip(Role, drain, state, strict=True)
            if count
        )
        state = state.next(PoolState.forget, drain)
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


def _need(seen: Observation, goals: Goals, times: float = 1.0) -> tuple[Pools, tuple[str, ...]]:
    """Returns the workers needed at a multiple of the load, and the reasons."""
    if not seen.window.requests or not seen.window.compute_seconds:
        return goals.least, ("no request arrived that could be served",)
    prefill, why_prefill = _prefill_need(seen, goals, times)
    decode, why_decode = _decode_need(seen, goals, times)
    need = Pools(max(prefill, goals.least.prefill), max(decode, goals.least.decode))
    return need, (why_prefill, why_decode)


def _prefill_need(seen: Observation, goals: Goals, times: float) -> tuple[int, str]:
    window = seen.window
    # Up to a second of work for each worker is no backlog.
    beyond = max(0.0, seen.queued_seconds - seen.have.prefill)
    load = PrefillLoad(
        rate=window.rate * times,
        compute_seconds=window.compute_seconds,
        dispersion=window.dispersion,
        backlog=beyond / RECOVERY_SECONDS,
    )
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
    window, (once, request, page, _) = seen.window, seen.costs.step
    load = DecodeLoad(
        rate=window.rate * times,
        answer_tokens=max(window.answer_tokens, 1.0),
        pages=window.pages,
        step_seconds=once,
        request_seconds=request + page * window.pages,
        waiting=seen.waiting,
    )
    workers = decode_workers(load, goals.itl, seen.max_batch, seen.pool_pages)
    batch = load.batch(workers)
    waiting = f" and {load.waiting} that wait" if load.waiting else ""
    largest = load.largest_batch(goals.itl, seen.max_batch, seen.pool_pages)
    return workers, (
        f"decode: {load.rate:.2f} answers/s of {load.answer_tokens:.0f} tokens{waiting} are"
        f" batches of {batch:.1f} on {workers} workers, {1e3 * load.seconds(batch):.1f} ms a step;"
        f" up to {largest:.0f} keep to {1e3 * goals.itl:g} ms and fit"
    )

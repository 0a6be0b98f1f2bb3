"""Simulates a cluster: events on a heap, the router's policy, and workers that cost what a
profile says.

    arrives ─▶ placed ─▶ computed: token #1 ─▶ pages there ─▶ in the batch ─▶ ended
                  └──────▶ pages promised by decode ──┘

A prefill worker computes its prompts in the order in which they come, as many tokens a step as
there are, up to a limit; a decode worker steps all its requests at once, and its steps are equally
long until one comes or goes, or others begin or end to compute on the same cores. What is left
out: prompts read by decode workers, pages fetched from them or kept in a second tier, preemption
(decode promises the pages of the answer with those of the prompt), failures, and the network but
for the transfer of pages.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from baton.core.errors import BatonError
from baton.core.types import Role
from baton.planner.profile import Profile
from baton.planner.simulated_workers import (
    DecodeBatch,
    DecodePool,
    PrefillPool,
    SimulatedRequest,
    WorkerPool,
)
from baton.planner.simulation_report import PoolUse, SimulationReport, Tally, TimedDecision
from baton.planner.sizing import (
    NONE,
    Decision,
    Goals,
    Observation,
    PlannerState,
    Pools,
    other,
    plan,
)
from baton.planner.trace import BLOCK, Arrival
from baton.planner.traffic_window import ROUND_SECONDS, TrafficWindow
from baton.router.placement.cost_model import ANSWER_PRIOR, ANSWER_RATE
from baton.router.placement.placement import FetchPages, LocalPrefill, Placement, Snapshot
from baton.router.placement.policy import choose

IDLE = PoolUse(0.0, 0.0)

LEARN_EVERY = 64
"""Answers, between two changes of the length that the policy expects."""


@dataclass(frozen=True, slots=True)
class Setup:
    workers: Pools
    profile: Profile
    goals: Goals
    # Whether the planner may change the workers.
    plans: bool = False
    block_tokens: int = BLOCK
    worker_backlog: int = 16
    # Between two plans.
    round_seconds: float = ROUND_SECONDS


class Simulator:
    def __init__(self, setup: Setup) -> None:
        profile = setup.profile
        self._setup = setup
        self._profile = profile
        pages_of_block = setup.block_tokens / profile.page_size
        self._prefill = PrefillPool(int(profile.prefill_pages / pages_of_block))
        self._decode = DecodePool(int(profile.decode_pages / pages_of_block))
        self._answer_tokens = ANSWER_PRIOR
        self._answers = 0
        self._costs = profile.costs(ANSWER_PRIOR)
        self._cores = profile.cores
        self._shares_hardware = bool(profile.step[3] or profile.shared_cores)
        self._now = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._line: deque[Arrival] = deque()
        self._placed = 0
        self._tally = Tally(setup.goals.ttft, setup.goals.itl)
        # Told of requests only where rounds end, which let go of them.
        self._window = TrafficWindow(setup.round_seconds)
        self._state = PlannerState()
        self._coming = NONE
        self._leaving: dict[tuple[Role, int], Role | None] = {}  # and what each becomes
        self._decisions: list[TimedDecision] = []
        self._missing = 0  # workers, a round before
        for role in Role:
            for _ in range(setup.workers.of(role)):
                self._pool(role).add(0.0)

    def run(self, arrivals: Iterable[Arrival]) -> SimulationReport:
        """Until every request is answered."""
        if self._setup.plans:
            self._at(self._setup.round_seconds, self._plan, None)
        last = 0.0
        for arrival in arrivals:
            self._run_until(arrival.seconds)
            last = self._now = arrival.seconds
            self._arrive(arrival)
        if self._setup.plans:
            self._stop_planning()
        self._run_until(float("inf"))
        prefill, decode = self._use(self._prefill), self._use(self._decode)
        return self._tally.report(last, prefill, decode, self._decisions)

    def _stop_planning(self) -> None:
        """No more plans: nothing arrives any more."""
        self._events = [event for event in self._events if event[2] != self._plan]
        heapq.heapify(self._events)

    def _run_until(self, seconds: float) -> None:
        events = self._events
        while events and events[0][0] <= seconds:
            self._now, _, action, subject = heapq.heappop(events)
            action(subject)

    def _at(self, seconds: float, action: Callable[[Any], None], subject: object) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), action, subject))

    def _pool(self, role: Role) -> PrefillPool | DecodePool:
        return self._prefill if role is Role.PREFILL else self._decode

    # A request's way

    def _arrive(self, arrival: Arrival) -> None:
        if self._setup.plans:
            self._window.arrived(self._now)
        if self._line or not self._place(arrival):
            self._line.append(arrival)
            self._tally.most_queued = max(self._tally.most_queued, len(self._line))

    def _place_waiting(self) -> None:
        while self._line and self._place(self._line[0]):
            self._line.popleft()

    def _place(self, arrival: Arrival) -> bool:
        if arrival.answer_tokens > 1 and not self._decode.has_room(self._setup.worker_backlog):
            return False
        snapshot = self.snapshot(arrival)
        placement = choose(snapshot, one_token=arrival.answer_tokens == 1)
        if isinstance(placement, BatonError):
            return False
        self._placed += 1
        request = self._begin(arrival, snapshot, placement)
        self._tally.prompt_tokens += arrival.prompt_tokens
        self._tally.cached_tokens += request.cached_tokens
        if self._setup.plans:
            self._window.placed(request.compute_seconds)
        was_idle = self._prefill.is_empty(request.prefill)
        self._prefill.put(request, self._now)
        if was_idle:
            self._read(request.prefill)
        self._prefill.caches.hold(request.prefill, arrival.blocks)
        if request.decode >= 0:
            self._reserve(request)
        if was_idle:
            self._disturb()
        return True

    def snapshot(self, arrival: Arrival) -> Snapshot:
        """What the policy decides on. Decode workers never prefill here, nor lend pages."""
        setup, profile = self._setup, self._profile
        # A prompt's last token is always computed.
        most = (arrival.prompt_tokens - 1) // profile.page_size * profile.page_size
        prefill, decode = (
            pool.cached_tokens(arrival.blocks, setup.block_tokens, most)
            for pool in (self._prefill, self._decode)
        )
        return Snapshot(
            self._prefill.columns(prefill, self._decode.all_active),
            self._decode.columns(decode, profile.decode_pages, setup.worker_backlog),
            local=LocalPrefill.NEVER,
            fetch=FetchPages.NEVER,
            costs=self._costs,
            turn=self._placed,
            prompt_tokens=arrival.prompt_tokens,
            tokens_wanted=arrival.answer_tokens,
            page_size=profile.page_size,
            page_bytes=profile.page_bytes,
        )

    def _begin(
        self, arrival: Arrival, snapshot: Snapshot, placement: Placement
    ) -> SimulatedRequest:
        size, prefill, decode = self._profile.page_size, placement.prefill, placement.decode
        cached = int(snapshot.prefill.cached_tokens[snapshot.prefill.worker_ids.index(prefill)])
        missing = arrival.prompt_tokens - cached
        seconds = self._costs.prefill_seconds(missing, cached)
        request = SimulatedRequest(arrival, int(prefill), int(decode or -1), cached, seconds)
        if decode:
            held = int(snapshot.decode.cached_tokens[snapshot.decode.worker_ids.index(decode)])
            request.moved_pages = -(-(arrival.prompt_tokens - held) // size)
            request.prompt_pages = -(-arrival.prompt_tokens // size)
            request.pages = -(-(arrival.prompt_tokens + arrival.answer_tokens) // size)
        return request

    def _reserve(self, request: SimulatedRequest) -> None:
        index = request.decode
        self._decode.requests[index] += 1
        self._decode.caches.hold(index, request.arrival.blocks)
        self._decode.waiting[index] += 1
        self._decode.workers[index].waiting.append(request)
        self._grant(index)

    def _grant(self, index: int) -> None:
        """Promises pages to those that wait, the oldest first, as long as there are any."""
        batch = self._decode.workers[index]
        while batch.waiting:
            request = batch.waiting[0]
            room = self._profile.decode_pages - batch.promised_pages
            # One that would never fit has the worker to itself.
            if request.pages > room and batch.promised_pages:
                return
            batch.waiting.popleft()
            batch.promised_pages += request.pages
            batch.prompt_pages += request.prompt_pages
            self._decode.waiting[index] -= 1
            self._decode.leased[index] += request.prompt_pages
            request.granted = True
            if request.first_at:
                self._travel(request, 0.0)

    def _read(self, index: int) -> None:
        """A prefill worker begins a step."""
        seconds, completed = self._prefill.begin_step(index, self._profile.chunk_tokens)
        if self._profile.crowding:
            seconds *= 1.0 + self._profile.crowding * (self._prefill.busy - 1)
        self._at(self._now + seconds, self._has_read, (index, completed))

    def _has_read(self, subject: tuple[int, list[SimulatedRequest]]) -> None:
        index, completed = subject
        for request in completed:
            self._first_token(request)
        if not self._prefill.is_empty(index):
            self._read(index)

    def _first_token(self, request: SimulatedRequest) -> None:
        self._prefill.take(request)
        request.first_at = self._now
        if self._prefill.is_empty(request.prefill):
            self._disturb()
            self._see_off(Role.PREFILL, request.prefill)
        if request.decode < 0:
            self._answered(request)
        elif request.granted:
            self._travel(request, request.compute_seconds)

    def _travel(self, request: SimulatedRequest, hidden_behind: float) -> None:
        size = request.moved_pages * self._profile.page_bytes
        late = self._costs.exposed_seconds(size, hidden_behind)
        self._at(self._prefill.push(request.prefill, self._now, late), self._landed, request)

    def _landed(self, request: SimulatedRequest) -> None:
        self._advance(request.decode).ready.append(request)
        self._step_on(request.decode)

    def _stepped(self, subject: tuple[int, int]) -> None:
        """After the last step of a request, or one before others join."""
        index, version = subject
        batch = self._decode.workers[index]
        if version != batch.version:
            return
        self._advance(index)
        while request := batch.ended():
            batch.promised_pages -= request.pages
            batch.prompt_pages -= request.prompt_pages
            self._decode.requests[index] -= 1
            self._answered(request)
        self._grant(index)
        self._step_on(index)
        self._see_off(Role.DECODE, index)
        self._place_waiting()

    def _step_on(self, index: int) -> None:
        """Those that are ready join as far as the batch goes; then the steps have a new price."""
        batch = self._decode.workers[index]
        was_idle = not self._decode.running[index]
        if batch.is_between_steps:
            while batch.ready and len(batch.ends) < self._profile.max_batch:
                batch.join(batch.ready.popleft(), next(self._numbers))
        self._decode.running[index] = len(batch.ends)
        self._price(index)
        if was_idle == bool(batch.ends):
            self._disturb()

    def _price(self, index: int) -> None:
        batch = self._decode.workers[index]
        pages = batch.leased_pages(self._profile.page_size)
        self._decode.leased[index] = pages
        busy, speed = self._beside() if self._shares_hardware else (0, 1.0)
        batch.price(self._costs, pages, busy, speed)
        batch.version += 1
        if (change := batch.next_change(self._profile.max_batch)) is not None:
            self._at(change, self._stepped, (index, batch.version))

    def _beside(self) -> tuple[int, float]:
        """Prefill workers that compute, and how fast decode workers are beside them and each
        other."""
        busy = self._prefill.busy
        return busy, self._cores.decode_speed(busy, self._decode.busy)

    def _disturb(self) -> None:
        """A worker began or ended to compute: where they share hardware, steps feel it."""
        if not self._shares_hardware:
            return
        for index, batch in enumerate(self._decode.workers):
            if batch.ends:
                self._advance(index)
                self._price(index)

    def _advance(self, index: int) -> DecodeBatch:
        """Up to now."""
        batch = self._decode.workers[index]
        seconds = batch.advance(self._now, self._tally.gaps)
        self._decode.busy_seconds[index] += seconds
        self._tally.busy_seconds += seconds
        self._tally.batch_seconds += seconds * len(batch.ends)
        return batch

    def _answered(self, request: SimulatedRequest) -> None:
        arrival = request.arrival
        gaps = arrival.answer_tokens - 1
        ttft = request.first_at - arrival.seconds + self._profile.overhead_seconds
        self._tally.answered(ttft, (self._now - request.first_at) / gaps if gaps else 0.0)
        if self._setup.plans:
            pages = (arrival.prompt_tokens + arrival.answer_tokens / 2) / self._profile.page_size
            self._window.answered(1, arrival.answer_tokens, arrival.answer_tokens * pages)
        self._answers += 1
        rate = max(ANSWER_RATE, 1.0 / self._answers)
        self._answer_tokens += rate * (arrival.answer_tokens - self._answer_tokens)
        if self._answers % LEARN_EVERY == 1:
            self._costs = self._profile.costs(self._answer_tokens)

    # Workers that come and go

    def _plan(self, _: None) -> None:
        decision, self._state = plan(self._observe(), self._state, self._setup.goals)
        if decision.is_news(self._missing):
            self._decisions.append(TimedDecision(self._now, decision))
        self._missing = decision.missing
        self._apply(decision)
        self._at(self._now + self._setup.round_seconds, self._plan, None)

    def _observe(self) -> Observation:
        prefill, decode = self._prefill, self._decode
        profile = self._profile
        return Observation(
            have=Pools(
                len(prefill.active) + self._coming.prefill, len(decode.active) + self._coming.decode
            ),
            window=self._window.end_round(),
            costs=self._costs,
            max_batch=profile.max_batch,
            pool_pages=profile.decode_pages,
            overhead_seconds=profile.overhead_seconds,
            queued_seconds=prefill.queued_seconds(self._now),
            waiting=len(self._line) + decode.waiting_requests(),
        )

    def _apply(self, decision: Decision) -> None:
        for role in Role:
            for _ in range(decision.add.of(role)):
                self._coming = self._coming.with_more(role, 1)
                self._expect(role, self._profile.start_seconds)
            for _ in range(decision.drain.of(role)):
                self._retire(role, None)
        if decision.switch:
            for _ in range(decision.switch.count):
                self._retire(other(decision.switch.to), decision.switch.to)

    def _expect(self, role: Role, seconds: float) -> None:
        self._at(self._now + seconds, self._come, role)

    def _come(self, role: Role) -> None:
        self._coming = self._coming.with_more(role, -1)
        self._pool(role).add(self._now)
        self._place_waiting()

    def _retire(self, role: Role, becomes: Role | None) -> None:
        """Drains the worker that has the least to do."""
        pool = self._pool(role)
        load = self._prefill.pending if role is Role.PREFILL else self._decode.requests
        index = int(min(pool.active, key=lambda each: load[each]))
        pool.retire(index)
        self._leaving[role, index] = becomes
        if becomes:
            self._coming = self._coming.with_more(becomes, 1)
        self._see_off(role, index)

    def _see_off(self, role: Role, index: int) -> None:
        """Once a worker that drains has nothing left, it ends, or takes up its new role."""
        if (role, index) not in self._leaving or not self._pool(role).is_empty(index):
            return
        becomes = self._leaving.pop((role, index))
        self._pool(role).end(index, self._now)
        if becomes:
            self._expect(becomes, self._profile.switch_seconds)

    def _use(self, pool: WorkerPool) -> PoolUse:
        total = pool.worker_seconds(self._now)
        return PoolUse(total / self._now, sum(pool.busy_seconds) / total) if total else IDLE

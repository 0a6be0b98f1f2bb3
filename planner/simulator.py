"""Simulates a cluster: events on a heap, the router's placement policy, and workers with the costs
of a profile.

    arrives ─▶ placed ─▶ computed: first token ─▶ pages arrived ─▶ in the batch ─▶ ended
                  └──────▶ pages reserved on decode ──┘

A prefill worker computes its prompts in order, up to a limit of tokens a step. A decode worker
steps all its requests at once; its steps are equally long until a request joins or ends, or other
workers on the same cores start or stop computing. Not simulated: local prefill, fetched pages, the
second tier, preemption (decode reserves the answer's pages with the prompt's), failures, and
message times.
"""

from __future__ import annotations

import heapq
import itertools
import math
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
from baton.planner.simulation_report import SimulationReport, Tally, TimedDecision
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
from baton.planner.trace import BLOCK, TraceRequest
from baton.planner.traffic_window import ROUND_SECONDS, TrafficWindow
from baton.router.placement.cost_model import ANSWER_PRIOR, ANSWER_RATE
from baton.router.placement.placement import FetchPages, LocalPrefill, Placement, Snapshot
from baton.router.placement.policy import choose

LEARN_EVERY = 64
"""Answers between two updates of the answer length that the policy expects."""


@dataclass(frozen=True, slots=True)
class Setup:
    workers: Pools
    profile: Profile
    goals: Goals
    plans: bool = False  # the planner may change the pools
    block_tokens: int = BLOCK
    worker_backlog: int = 16
    round_seconds: float = ROUND_SECONDS  # time between two plans


class Simulator:
    def __init__(self, setup: Setup) -> None:
        profile = setup.profile
        self._setup = setup
        self._profile = profile
        # A cached prefix needs no pages of slices with a window.
        whole = max(1, profile.slices.count(None))
        pages_of_block = whole * setup.block_tokens / profile.page_size
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
        self._queue: deque[TraceRequest] = deque()
        self._placed = 0
        self._tally = Tally(setup.goals.ttft, setup.goals.itl)
        # Filled only if the planner runs, whose rounds drop old entries.
        self._window = TrafficWindow(setup.round_seconds)
        self._state = PlannerState()
        self._coming = NONE
        self._draining: dict[tuple[Role, int], Role | None] = {}  # the next role, or None
        self._decisions: list[TimedDecision] = []
        self._missing = 0  # workers, in the last round
        for role in Role:
            for _ in range(setup.workers.of(role)):
                self._pool(role).add(0.0)

    def run(self, arrivals: Iterable[TraceRequest]) -> SimulationReport:
        """Runs until every request is answered."""
        if self._setup.plans:
            self._at(self._setup.round_seconds, self._plan, None)
        last = 0.0
        for arrival in arrivals:
            self._run_until(arrival.seconds)
            last = self._now = arrival.seconds
            self._arrive(arrival)
        # Nothing is planned after the last arrival.
        self._events = [event for event in self._events if event[2] != self._plan]
        heapq.heapify(self._events)
        self._run_until(float("inf"))
        prefill, decode = self._prefill.use(self._now), self._decode.use(self._now)
        return self._tally.report(last, prefill, decode, self._decisions)

    def _run_until(self, seconds: float) -> None:
        events = self._events
        while events and events[0][0] <= seconds:
            self._now, _, action, subject = heapq.heappop(events)
            action(subject)

    def _at(self, seconds: float, action: Callable[[Any], None], subject: object) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), action, subject))

    def _pool(self, role: Role) -> PrefillPool | DecodePool:
        return self._prefill if role is Role.PREFILL else self._decode

    # The path of a request

    def _arrive(self, arrival: TraceRequest) -> None:
        if self._setup.plans:
            self._window.arrived(self._now)
        if self._queue or not self._place(arrival):
            self._queue.append(arrival)
            self._tally.most_queued = max(self._tally.most_queued, len(self._queue))

    def _place_queued(self) -> None:
        while self._queue and self._place(self._queue[0]):
            self._queue.popleft()

    def _place(self, arrival: TraceRequest) -> bool:
        room = self._decode.has_room(self._setup.worker_backlog)
        if arrival.answer_tokens > 1 and not room.any():
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
            self._start_prefill_step(request.prefill)
        self._prefill.caches.hold(request.prefill, arrival.blocks)
        if request.decode >= 0:
            self._reserve(request)
        if was_idle:
            self._interfere()
        return True

    def snapshot(self, arrival: TraceRequest) -> Snapshot:
        """Returns the policy's view of the cluster, without local prefill and fetched pages."""
        setup, profile = self._setup, self._profile
        # A prompt's last token is always computed.
        most = (arrival.prompt_tokens - 1) // profile.page_size * profile.page_size
        prefill, decode = (
            pool.cached_tokens(arrival.blocks, setup.block_tokens, most)
            for pool in (self._prefill, self._decode)
        )
        return Snapshot(
            self._prefill.columns(prefill, self._decode.all_names),
            self._decode.columns(decode, profile.decode_pages, setup.worker_backlog),
            local=LocalPrefill.NEVER,
            fetch=FetchPages.NEVER,
            costs=self._costs,
            turn=self._placed,
            prompt_tokens=arrival.prompt_tokens,
            tokens_wanted=arrival.answer_tokens,
            page_size=profile.page_size,
            page_bytes=profile.page_bytes,
            windows=profile.slices,
        )

    def _begin(
        self, arrival: TraceRequest, snapshot: Snapshot, placement: Placement
    ) -> SimulatedRequest:
        prompt, prefill, decode = arrival.prompt_tokens, int(placement.prefill), placement.decode
        cached = int(snapshot.prefill.cached_tokens[prefill])
        seconds = self._costs.prefill.seconds(prompt - cached, cached)
        request = SimulatedRequest(arrival, prefill, int(decode or -1), cached, seconds)
        if decode:
            held = int(snapshot.decode.cached_tokens[request.decode])
            first, last = map(self._profile.pages_held, (prompt, prompt + arrival.answer_tokens))
            request.moved_pages = int(snapshot.pages_after(prompt, held))
            request.prompt_pages = int(snapshot.pages_after(prompt, 0))
            request.pages = max(request.prompt_pages, math.ceil(last))
            request.growth = (last - first) / arrival.answer_tokens
        return request

    def _reserve(self, request: SimulatedRequest) -> None:
        index = request.decode
        self._decode.requests[index] += 1
        self._decode.caches.hold(index, request.arrival.blocks)
        self._decode.waiting[index] += 1
        self._decode.workers[index].waiting.append(request)
        self._grant(index)

    def _grant(self, index: int) -> None:
        """Reserves pages for waiting requests, oldest first, as long as they fit."""
        batch = self._decode.workers[index]
        while batch.waiting:
            request = batch.waiting[0]
            room = self._profile.decode_pages - batch.reserved_pages
            # A request larger than the pool runs alone.
            if request.pages > room and batch.reserved_pages:
                return
            batch.waiting.popleft()
            batch.reserved_pages += request.pages
            batch.prompt_pages += request.prompt_pages
            self._decode.waiting[index] -= 1
            self._decode.leased[index] += request.prompt_pages
            request.granted = True
            if request.first_at:
                self._push(request, 0.0)

    def _start_prefill_step(self, index: int) -> None:
        seconds, completed = self._prefill.begin_step(index, self._profile.chunk_tokens)
        if self._profile.crowding:
            seconds *= 1.0 + self._profile.crowding * (self._prefill.busy - 1)
        self._at(self._now + seconds, self._end_prefill_step, (index, completed))

    def _end_prefill_step(self, subject: tuple[int, list[SimulatedRequest]]) -> None:
        index, completed = subject
        for request in completed:
            self._emit_first_token(request)
        if not self._prefill.is_empty(index):
            self._start_prefill_step(index)

    def _emit_first_token(self, request: SimulatedRequest) -> None:
        self._prefill.remove(request)
        request.first_at = self._now
        if self._prefill.is_empty(request.prefill):
            self._interfere()
            self._end_drained(Role.PREFILL, request.prefill)
        if request.decode < 0:
            self._end_answer(request)
        elif request.granted:
            self._push(request, request.compute_seconds)

    def _push(self, request: SimulatedRequest, hidden_behind: float) -> None:
        size = request.moved_pages * self._profile.page_bytes
        late = self._costs.exposed_seconds(self._costs.transfer_seconds(size), hidden_behind)
        arrives = self._prefill.push(request.prefill, self._now, late)
        self._at(arrives, self._join_batch, request)

    def _join_batch(self, request: SimulatedRequest) -> None:
        self._advance(request.decode).ready.append(request)
        self._continue_batch(request.decode)

    def _change_batch(self, subject: tuple[int, int]) -> None:
        """Ends requests after their last step, and lets ready ones join."""
        index, version = subject
        batch = self._decode.workers[index]
        if version != batch.version:
            return
        self._advance(index)
        while request := batch.pop_ended():
            batch.reserved_pages -= request.pages
            batch.prompt_pages -= request.prompt_pages
            self._decode.requests[index] -= 1
            self._end_answer(request)
        self._grant(index)
        self._continue_batch(index)
        self._end_drained(Role.DECODE, index)
        self._place_queued()

    def _continue_batch(self, index: int) -> None:
        """Adds ready requests while the batch has room, and updates the step's length."""
        batch = self._decode.workers[index]
        was_idle = not self._decode.running[index]
        if batch.is_between_steps:
            while batch.ready and len(batch.ends) < self._profile.max_batch:
                batch.join(batch.ready.popleft(), next(self._numbers))
        self._decode.running[index] = len(batch.ends)
        self._price(index)
        if was_idle == bool(batch.ends):
            self._interfere()

    def _price(self, index: int) -> None:
        batch = self._decode.workers[index]
        pages = batch.leased_pages
        self._decode.leased[index] = pages
        busy, speed = 0, 1.0
        if self._shares_hardware:
            busy = self._prefill.busy
            speed = self._cores.decode_speed(busy, self._decode.busy)
        batch.price(self._costs, pages, busy, speed)
        batch.version += 1
        if (change := batch.next_change(self._profile.max_batch)) is not None:
            self._at(change, self._change_batch, (index, batch.version))

    def _interfere(self) -> None:
        """Updates the lengths of all steps after a worker on shared hardware has started or
        stopped computing."""
        if not self._shares_hardware:
            return
        for index, batch in enumerate(self._decode.workers):
            if batch.ends:
                self._advance(index)
                self._price(index)

    def _advance(self, index: int) -> DecodeBatch:
        """Runs a batch's steps until now."""
        batch = self._decode.workers[index]
        seconds = batch.advance(self._now, self._tally.gaps)
        self._decode.busy_seconds[index] += seconds
        self._tally.busy_seconds += seconds
        self._tally.batch_seconds += seconds * len(batch.ends)
        return batch

    def _end_answer(self, request: SimulatedRequest) -> None:
        arrival = request.arrival
        gaps = arrival.answer_tokens - 1
        ttft = request.first_at - arrival.seconds + self._profile.overhead_seconds
        self._tally.answered(ttft, (self._now - request.first_at) / gaps if gaps else 0.0)
        if self._setup.plans:
            pages = self._profile.pages_held(arrival.prompt_tokens + arrival.answer_tokens / 2)
            self._window.answered(1, arrival.answer_tokens, arrival.answer_tokens * pages)
        self._answers += 1
        rate = max(ANSWER_RATE, 1.0 / self._answers)
        self._answer_tokens += rate * (arrival.answer_tokens - self._answer_tokens)
        if self._answers % LEARN_EVERY == 1:
            self._costs = self._profile.costs(self._answer_tokens)

    # Changes of the pools

    def _plan(self, _: None) -> None:
        decision, self._state = plan(self._observe(), self._state, self._setup.goals)
        if decision.is_news(self._missing):
            self._decisions.append(TimedDecision(self._now, decision))
        self._missing = decision.missing
        self._apply(decision)
        self._at(self._now + self._setup.round_seconds, self._plan, None)

    def _observe(self) -> Observation:
        prefill, decode, profile = self._prefill, self._decode, self._profile
        have = self._coming.with_more(Role.PREFILL, int(prefill.active.sum()))
        return Observation(
            have=have.with_more(Role.DECODE, int(decode.active.sum())),
            window=self._window.end_round(),
            costs=self._costs,
            max_batch=profile.max_batch,
            pool_pages=profile.decode_pages,
            overhead_seconds=profile.overhead_seconds,
            queued_seconds=prefill.queued_seconds(self._now),
            waiting=len(self._queue) + decode.waiting_requests(),
        )

    def _apply(self, decision: Decision) -> None:
        for role in Role:
            for _ in range(decision.add.of(role)):
                self._coming = self._coming.with_more(role, 1)
                self._at(self._now + self._profile.start_seconds, self._add_worker, role)
            for _ in range(decision.drain.of(role)):
                self._drain(role, None)
        if decision.switch:
            for _ in range(decision.switch.count):
                self._drain(other(decision.switch.to), decision.switch.to)

    def _add_worker(self, role: Role) -> None:
        self._coming = self._coming.with_more(role, -1)
        self._pool(role).add(self._now)
        self._place_queued()

    def _drain(self, role: Role, next_role: Role | None) -> None:
        """Drains the least loaded worker of a role."""
        pool: WorkerPool = self._pool(role)
        load = self._prefill.pending if role is Role.PREFILL else self._decode.requests
        index = min(pool.active_indices(), key=load.__getitem__)
        pool.retire(index)
        self._draining[role, index] = next_role
        if next_role:
            self._coming = self._coming.with_more(next_role, 1)
        self._end_drained(role, index)

    def _end_drained(self, role: Role, index: int) -> None:
        """Ends a draining worker that has no requests left, or switches its role."""
        if (role, index) not in self._draining or not self._pool(role).is_empty(index):
            return
        next_role = self._draining.pop((role, index))
        self._pool(role).end(index, self._now)
        if next_role:
            self._at(self._now + self._profile.switch_seconds, self._add_worker, next_role)

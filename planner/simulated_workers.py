"""The simulated workers of each pool, as columns: one array for each value that the policy uses.

    added ─▶ active ─retire─▶ draining ─no requests left─▶ ended

An index is never reused. Only active workers are sent requests.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy
from numpy.typing import NDArray

from baton.planner.simulation_report import PoolUse
from baton.planner.trace import TraceRequest
from baton.router.observe.trends import Histogram
from baton.router.placement.cost_model import Costs
from baton.router.placement.placement import DecodeColumns, PrefillColumns, column_of

Array = NDArray[numpy.int64]

TINY = 1e-6
"""Tolerance for sums of step fractions."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A placed request."""

    arrival: TraceRequest
    prefill: int
    # -1 if only one token is wanted.
    decode: int
    cached_tokens: int
    compute_seconds: float
    # Prompt tokens that no step has started to compute.
    uncomputed: int = 0
    # Pages to transfer, pages of the prompt, and pages of prompt and answer.
    moved_pages: int = 0
    prompt_pages: int = 0
    pages: int = 0
    # Pages that each token of the answer adds.
    growth: float = 0.0
    granted: bool = False  # decode has reserved its pages
    # The first token's time; 0 before.
    first_at: float = 0.0
    # The worker's step count when this joined the batch.
    joined: float = 0.0

    @property
    def missing_tokens(self) -> int:
        """Uncached prompt tokens."""
        return self.arrival.prompt_tokens - self.cached_tokens


class WorkerPool:
    def __init__(self, cached_blocks: int) -> None:
        self.caches = BlockCaches(cached_blocks)
        self.names: list[str] = []
        self.all_names: frozenset[str] = frozenset()
        self.began: list[float] = []
        self.ended: list[float] = []
        self.busy_seconds: list[float] = []
        # Columns: 1 for active workers, else 0; and all 0.
        self.active = self._none = numpy.zeros(0, dtype=numpy.int64)

    def add(self, now: float) -> None:
        self.caches.add_worker(len(self.names))
        self.names.append(str(len(self.names)))
        self.all_names = frozenset(self.names)
        self.began.append(now)
        self.ended.append(math.inf)
        self.busy_seconds.append(0.0)
        self.active, self._none = numpy.append(self.active, 1), numpy.append(self._none, 0)

    def retire(self, index: int) -> None:
        """Sends no more requests to a worker."""
        self.active[index] = 0

    def active_indices(self) -> list[int]:
        return numpy.flatnonzero(self.active).tolist()

    def cached_tokens(self, blocks: Sequence[int], block_tokens: int, most: int) -> Array:
        """Returns the leading prompt tokens that each worker has cached, at most `most`."""
        return numpy.minimum(self.caches.leading(blocks, len(self.names)) * block_tokens, most)

    def end(self, index: int, now: float) -> None:
        self.ended[index] = now
        self.caches.remove_worker(index)

    def use(self, now: float) -> PoolUse:
        """Returns the use until `now`."""
        pairs = zip(self.began, self.ended, strict=True)
        total = sum(max(0.0, min(end, now) - begin) for begin, end in pairs)
        return PoolUse(total / now, sum(self.busy_seconds) / total) if total else PoolUse(0.0, 0.0)


class PrefillPool(WorkerPool):
    """Workers compute prompts in order, up to a limit of tokens a step."""

    def __init__(self, cached_blocks: int) -> None:
        super().__init__(cached_blocks)
        self.pending = self.active
        self.prompts: list[int] = []
        self.free_at: list[float] = []
        # Prompts that no step has started to complete.
        self.uncomputed: list[deque[SimulatedRequest]] = []
        # When the last pushed page arrives.
        self.pushed_at: list[float] = []

    def add(self, now: float) -> None:
        super().add(now)
        self.pending = numpy.append(self.pending, 0)
        self.prompts.append(0)
        self.free_at.append(now)
        self.uncomputed.append(deque())
        self.pushed_at.append(now)

    @property
    def busy(self) -> int:
        """Workers with prompts."""
        return sum(map(bool, self.prompts))

    def is_empty(self, index: int) -> bool:
        return not self.prompts[index]

    def put(self, request: SimulatedRequest, now: float) -> None:
        index = request.prefill
        request.uncomputed = request.missing_tokens
        self.uncomputed[index].append(request)
        self.pending[index] += request.missing_tokens
        self.prompts[index] += 1
        self.busy_seconds[index] += request.compute_seconds
        self.free_at[index] = max(now, self.free_at[index]) + request.compute_seconds

    def columns(self, cached: Array, reached: frozenset[str]) -> PrefillColumns:
        """Returns the policy's view: active workers have room and reach all decode workers."""
        reaches = [reached] * len(cached)
        columns = self.pending, self.active, cached, self._none
        return PrefillColumns(self.names, reaches, *map(column_of, columns))

    def begin_step(self, index: int, chunk_tokens: int) -> tuple[float, list[SimulatedRequest]]:
        """Returns the step's seconds and the prompts that it completes."""
        queue, left = self.uncomputed[index], chunk_tokens
        seconds, completed = 0.0, []
        while queue and left:
            request = queue[0]
            tokens = min(request.uncomputed, left)
            left -= tokens
            request.uncomputed -= tokens
            seconds += request.compute_seconds * tokens / request.missing_tokens
            if not request.uncomputed:
                completed.append(queue.popleft())
        return seconds, completed

    def remove(self, request: SimulatedRequest) -> None:
        """Removes a request whose prompt is computed."""
        self.pending[request.prefill] -= request.missing_tokens
        self.prompts[request.prefill] -= 1

    def push(self, index: int, now: float, seconds: float) -> float:
        """Returns when a prompt's last page arrives. A worker's pushes are sequential."""
        self.pushed_at[index] = max(now, self.pushed_at[index]) + seconds
        return self.pushed_at[index]

    def queued_seconds(self, now: float) -> float:
        return sum(max(0.0, self.free_at[index] - now) for index in self.active_indices())


class DecodePool(WorkerPool):
    def __init__(self, cached_blocks: int) -> None:
        super().__init__(cached_blocks)
        self.workers: list[DecodeBatch] = []
        self.requests = self.running = self.waiting = self.leased = self.active

    def add(self, now: float) -> None:
        super().add(now)
        for name in ("requests", "running", "waiting", "leased"):
            setattr(self, name, numpy.append(getattr(self, name), 0))
        self.workers.append(DecodeBatch(at=now))

    def columns(self, cached: Array, pages: int, backlog: int) -> DecodeColumns:
        """Returns the policy's view of workers with `pages` pages each, without local prefill and
        second tier."""
        columns = (
            self.requests,
            pages - self.leased,
            self.has_room(backlog),
            cached,
            self.running * self.active,
            self.waiting,
            self.leased,
            *[self._none] * 3,
        )
        return DecodeColumns(self.names, *map(column_of, columns))

    def is_empty(self, index: int) -> bool:
        return not self.requests[index]

    def has_room(self, backlog: int) -> Array:
        """Marks active workers on which fewer than `backlog` requests wait."""
        return self.active * (self.waiting < backlog)

    @property
    def busy(self) -> int:
        """Workers with running requests."""
        return int(numpy.count_nonzero(self.running))

    def waiting_requests(self) -> int:
        """Counts requests that wait for pages or for a place in the batch."""
        ready = sum(len(self.workers[index].ready) for index in self.active_indices())
        return int((self.waiting * self.active).sum()) + ready


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """The requests of a decode worker. `steps` counts its steps, with the fraction of the current
    one. Between two changes of the batch all steps are equally long, so steps need no events."""

    at: float
    steps: float = 0.0
    step_seconds: float = 0.0
    # When the current step began.
    step_began: float = 0.0
    # Requests in their first step.
    newest: list[SimulatedRequest] = field(default_factory=list)
    # Events of earlier versions of the batch are void.
    version: int = 0
    # Pages that a step adds to the running requests, and what this growth, counted from step 0,
    # overstates: the steps before each request joined.
    growth: float = 0.0
    before: float = 0.0
    # Reserved pages, and those of the prompts among them.
    reserved_pages: int = 0
    prompt_pages: int = 0
    # Running requests: the step after which each ends, and a number to break ties.
    ends: list[tuple[float, int, SimulatedRequest]] = field(default_factory=list)
    ready: deque[SimulatedRequest] = field(default_factory=deque)
    waiting: deque[SimulatedRequest] = field(default_factory=deque)

    def advance(self, now: float, gaps: Histogram) -> float:
        """Runs steps until now and adds the gap before each token to `gaps`. Returns the seconds
        of compute."""
        seconds, began, before = now - self.at, self.at, self.steps
        self.at = now
        if not self.ends or seconds <= 0:
            return 0.0
        self.steps += seconds / self.step_seconds
        number, last = math.floor(before + TINY) + 1, math.floor(self.steps + TINY)
        if number <= last:
            # Only the first, which was in flight, can differ from the others.
            self._end_step(began + (number - before) * self.step_seconds, gaps)
        if alike := max(0, last - number):
            gaps.note(self.step_seconds, alike * len(self.ends))
            self.step_began += alike * self.step_seconds
        return seconds

    def _end_step(self, now: float, gaps: Histogram) -> None:
        if others := len(self.ends) - len(self.newest):
            gaps.note(now - self.step_began, others)
        for request in self.newest:
            gaps.note(now - request.first_at, 1)
        self.newest.clear()
        self.step_began = now

    @property
    def is_between_steps(self) -> bool:
        return not self.ends or abs(self.steps - round(self.steps)) <= TINY

    def join(self, request: SimulatedRequest, number: int) -> None:
        """Adds a request to the step that begins now."""
        self.step_began = self.at
        request.joined = self.steps = round(self.steps)
        self.growth += request.growth
        self.before += request.growth * request.joined
        self.newest.append(request)
        heapq.heappush(
            self.ends, (request.joined + request.arrival.answer_tokens - 1, number, request)
        )

    def pop_ended(self) -> SimulatedRequest | None:
        """Returns a request that has had its last step, if any."""
        if not self.ends or self.ends[0][0] > self.steps + TINY:
            return None
        _, _, request = heapq.heappop(self.ends)
        self.growth -= request.growth
        self.before -= request.growth * request.joined
        return request

    @property
    def leased_pages(self) -> int:
        """Pages of the prompts and of the answers so far."""
        return self.prompt_pages + int(max(0.0, self.growth * self.steps - self.before))

    def price(self, costs: Costs, pages: int, busy_prefill: int, speed: float) -> None:
        beside = costs.step[3] * busy_prefill
        self.step_seconds = (costs.step_seconds(len(self.ends), pages) + beside) / speed

    def next_change(self, max_batch: int) -> float | None:
        """Returns when the next request ends or ready ones can join."""
        if not self.ends:
            return None
        step = self.ends[0][0]
        if self.ready and len(self.ends) < max_batch:
            step = min(step, math.floor(self.steps + TINY) + 1)
        return self.at + max(0.0, step - self.steps) * self.step_seconds


class BlockCaches:
    """The prefix caches of one pool's workers.

    Each block's holders are the bits of one number, so that one walk along a prompt's blocks finds
    what every worker has cached. A worker evicts the least recently used block; of one prompt, the
    last block first.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` blocks for each worker."""
        self._capacity = capacity
        self._holders: dict[int, int] = {}  # by block, a bit for each worker
        self._held: dict[int, OrderedDict[int, None]] = {}  # by worker, the last used at the end

    def add_worker(self, index: int) -> None:
        self._held[index] = OrderedDict()

    def remove_worker(self, index: int) -> None:
        for block in self._held.pop(index):
            if others := self._holders[block] ^ (1 << index):
                self._holders[block] = others
            else:
                del self._holders[block]

    def hold(self, index: int, blocks: Sequence[int]) -> None:
        """Caches the blocks of a prompt on a worker."""
        held, holders, bit = self._held[index], self._holders, 1 << index
        for block in reversed(blocks):
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = None
                holders[block] = holders.get(block, 0) | bit
        for _ in range(len(held) - self._capacity):
            oldest, _ = held.popitem(last=False)
            if others := holders[oldest] ^ bit:
                holders[oldest] = others
            else:
                del holders[oldest]

    def leading(self, blocks: Sequence[int], workers: int) -> Array:
        """Counts the leading blocks of a prompt that each worker holds."""
        everyone = left = (1 << workers) - 1
        groups: list[tuple[int, int]] = []  # how many blocks, held by whom
        depth = 0
        for depth, block in enumerate(blocks):
            holders = left & self._holders.get(block, 0)
            if holders != left:
                groups.append((depth, left ^ holders))
                left = holders
                if not left:
                    break
        if left:
            groups.append((depth + 1 if blocks else 0, left))
        return _spread(groups, everyone, workers)


def _spread(groups: list[tuple[int, int]], everyone: int, workers: int) -> Array:
    """Returns one depth for each worker. The largest group, usually nearly all, is written at
    once."""
    depth, largest = max(groups, key=lambda group: group[1].bit_count())
    found = numpy.full(workers, depth, dtype=numpy.int64)
    if largest == everyone:
        return found
    for depth, members in groups:
        while members and members is not largest:
            lowest = members & -members
            found[lowest.bit_length() - 1] = depth
            members ^= lowest
    return found

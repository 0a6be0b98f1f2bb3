"""The simulated workers of one pool, as columns: what the policy reads of them is one array each.

    added ─▶ active ─retire─▶ leaving ─nothing left─▶ gone

An index is given once. Only active workers are sent requests.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy
from numpy.typing import NDArray

from baton.planner.simulation_report import TimeHistogram
from baton.planner.trace import Arrival
from baton.router.placement.cost_model import Costs
from baton.router.placement.placement import DecodeColumns, PrefillColumns, column_of

Array = NDArray[numpy.int64]

TINY = 1e-6
"""Of a step: what sums of times may be off by."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request from its placement on."""

    arrival: Arrival
    prefill: int
    # -1 when the first token is the last.
    decode: int
    cached_tokens: int
    compute_seconds: float
    # Tokens of the prompt that no step has begun to compute.
    unread: int = 0
    # Pages that have to travel, those of the prompt, and those of prompt and answer.
    moved_pages: int = 0
    prompt_pages: int = 0
    pages: int = 0
    granted: bool = False
    # 0 until then.
    first_at: float = 0.0
    # The worker's count of steps when this was the first time in one.
    joined: float = 0.0

    @property
    def missing_tokens(self) -> int:
        """Those of the prompt that have to be computed."""
        return self.arrival.prompt_tokens - self.cached_tokens


class WorkerPool:
    """What both roles have."""

    def __init__(self, cached_blocks: int) -> None:
        self.caches = BlockCaches(cached_blocks)
        self.active: Array = numpy.zeros(0, dtype=numpy.int64)
        # Their names, for the policy.
        self.active_ids: list[str] = []
        self.all_active: frozenset[str] = frozenset()
        self._none = self._all = self.active  # a column of 0, and of 1
        self.began: list[float] = []
        self.ended: list[float] = []
        self.busy_seconds: list[float] = []

    @property
    def size(self) -> int:
        """Workers that there are or have been."""
        return len(self.began)

    def add(self, now: float) -> int:
        index = self.size
        self.began.append(now)
        self.ended.append(math.inf)
        self.busy_seconds.append(0.0)
        self.caches.add_worker(index)
        self._set_active(numpy.append(self.active, index))
        return index

    def retire(self, index: int) -> None:
        """Sends it nothing more."""
        self._set_active(self.active[self.active != index])

    def _set_active(self, indices: Array) -> None:
        self.active = indices
        self.active_ids = list(map(str, indices.tolist()))
        self.all_active = frozenset(self.active_ids)
        self._none, self._all = 0 * indices, 0 * indices + 1

    def _of_active(self, column: Array) -> Array:
        return column if len(self.active) == self.size else column[self.active]

    def cached_tokens(self, blocks: Sequence[int], block_tokens: int, most: int) -> Array:
        """Tokens at the front of a prompt that each active worker has cached, `most` at most."""
        held = self._of_active(self.caches.leading(blocks, self.size))
        return numpy.minimum(held * block_tokens, most)

    def end(self, index: int, now: float) -> None:
        self.ended[index] = now
        self.caches.remove_worker(index)

    def worker_seconds(self, until: float) -> float:
        pairs = zip(self.began, self.ended, strict=True)
        return sum(max(0.0, min(end, until) - begin) for begin, end in pairs)


class PrefillPool(WorkerPool):
    """Each computes its prompts in steps: of the oldest, as many tokens as one takes."""

    def __init__(self, cached_blocks: int) -> None:
        super().__init__(cached_blocks)
        self.pending: Array = numpy.zeros(0, dtype=numpy.int64)
        self.prompts: list[int] = []
        self.free_at: list[float] = []
        # Those that no step has begun to end.
        self.unread: list[deque[SimulatedRequest]] = []
        # When the last page of all that were pushed is there.
        self.pushed_at: list[float] = []

    def add(self, now: float) -> int:
        self.pending = numpy.append(self.pending, 0)
        self.prompts.append(0)
        self.free_at.append(now)
        self.unread.append(deque())
        self.pushed_at.append(now)
        return super().add(now)

    @property
    def busy(self) -> int:
        """Workers that have something to compute."""
        return sum(map(bool, self.prompts))

    def is_empty(self, index: int) -> bool:
        return not self.prompts[index]

    def put(self, request: SimulatedRequest, now: float) -> None:
        index = request.prefill
        request.unread = request.missing_tokens
        self.unread[index].append(request)
        self.pending[index] += request.missing_tokens
        self.prompts[index] += 1
        self.busy_seconds[index] += request.compute_seconds
        self.free_at[index] = max(now, self.free_at[index]) + request.compute_seconds

    def columns(self, cached: Array, reached: frozenset[str]) -> PrefillColumns:
        """As the policy sees the active workers: with room, and connected to all others."""
        reaches = [reached] * len(cached)
        columns = self._of_active(self.pending), self._all, cached, self._none
        return PrefillColumns(self.active_ids, reaches, *map(column_of, columns))

    def begin_step(self, index: int, chunk_tokens: int) -> tuple[float, list[SimulatedRequest]]:
        """How long it takes, and the prompts that it completes."""
        unread, left = self.unread[index], chunk_tokens
        seconds, completed = 0.0, []
        while unread and left:
            request = unread[0]
            tokens = min(request.unread, left)
            left -= tokens
            request.unread -= tokens
            seconds += request.compute_seconds * tokens / request.missing_tokens
            if not request.unread:
                completed.append(unread.popleft())
        return seconds, completed

    def take(self, request: SimulatedRequest) -> None:
        """It is computed."""
        index = request.prefill
        self.pending[index] -= request.missing_tokens
        self.prompts[index] -= 1

    def push(self, index: int, now: float, seconds: float) -> float:
        """When a prompt's last page is there. A worker's pushes go one after the other."""
        self.pushed_at[index] = max(now, self.pushed_at[index]) + seconds
        return self.pushed_at[index]

    def queued_seconds(self, now: float) -> float:
        return sum(max(0.0, self.free_at[index] - now) for index in map(int, self.active))


class DecodePool(WorkerPool):
    def __init__(self, cached_blocks: int) -> None:
        super().__init__(cached_blocks)
        self.workers: list[DecodeBatch] = []
        self.requests: Array = numpy.zeros(0, dtype=numpy.int64)
        self.running: Array = numpy.zeros(0, dtype=numpy.int64)
        self.waiting: Array = numpy.zeros(0, dtype=numpy.int64)
        self.leased: Array = numpy.zeros(0, dtype=numpy.int64)

    def add(self, now: float) -> int:
        for name in ("requests", "running", "waiting", "leased"):
            setattr(self, name, numpy.append(getattr(self, name), 0))
        self.workers.append(DecodeBatch(at=now))
        return super().add(now)

    def columns(self, cached: Array, pages: int, backlog: int) -> DecodeColumns:
        """As the policy sees the active workers, with pools of `pages`: nothing is prefilled
        there, or saved in a second tier."""
        none, waiting, leased = (
            self._none,
            self._of_active(self.waiting),
            self._of_active(self.leased),
        )
        columns = (
            self._of_active(self.requests),
            pages - leased,
            (waiting < backlog).astype(numpy.int64),
            cached,
            self._of_active(self.running),
            waiting,
            leased,
            none,
            none,
            none,
        )
        return DecodeColumns(self.active_ids, *map(column_of, columns))

    def is_empty(self, index: int) -> bool:
        return not self.requests[index]

    def has_room(self, backlog: int) -> bool:
        """Whether an active worker has fewer than `backlog` requests waiting."""
        return bool((self.waiting[self.active] < backlog).any())

    @property
    def busy(self) -> int:
        """Workers that step."""
        return int(numpy.count_nonzero(self.running))

    def waiting_requests(self) -> int:
        """For pages, or for a place in the batch."""
        ready = sum(len(self.workers[index].ready) for index in self.active)
        return int(self.waiting[self.active].sum()) + ready


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """The requests of a decode worker. It counts its steps, whole ones and the part that it has
    done of one; between two requests that come or go every step takes equally long, so no step is
    simulated by itself."""

    at: float
    steps: float = 0.0
    step_seconds: float = 0.0
    # When the current step began.
    step_began: float = 0.0
    # Those for which it is the first.
    newest: list[SimulatedRequest] = field(default_factory=list)
    # When the next request comes or goes is said to the event of this number, and to none before.
    version: int = 0
    # The sum of `joined` over those that run.
    joined: float = 0.0
    # Pages that are promised for good, and those of the prompts among them.
    promised_pages: int = 0
    prompt_pages: int = 0
    # Those that run: the step after which each ends, and a number that makes them differ.
    ends: list[tuple[float, int, SimulatedRequest]] = field(default_factory=list)
    ready: deque[SimulatedRequest] = field(default_factory=deque)
    waiting: deque[SimulatedRequest] = field(default_factory=deque)

    def advance(self, now: float, gaps: TimeHistogram) -> float:
        """Up to now, which ends some steps; `gaps` are told how long each request waited for its
        token. Returns the seconds during which it computed."""
        seconds, began, before = now - self.at, self.at, self.steps
        self.at = now
        if not self.ends or seconds <= 0:
            return 0.0
        self.steps += seconds / self.step_seconds
        number, last = math.floor(before + TINY) + 1, math.floor(self.steps + TINY)
        if number <= last:
            # Only the first can be unlike the others: it was under way.
            self._end_step(began + (number - before) * self.step_seconds, gaps)
        if alike := max(0, last - number):
            gaps.add(self.step_seconds, alike * len(self.ends))
            self.step_began += alike * self.step_seconds
        return seconds

    def _end_step(self, now: float, gaps: TimeHistogram) -> None:
        if others := len(self.ends) - len(self.newest):
            gaps.add(now - self.step_began, others)
        for request in self.newest:
            gaps.add(now - request.first_at, 1)
        self.newest.clear()
        self.step_began = now

    @property
    def is_between_steps(self) -> bool:
        return not self.ends or abs(self.steps - round(self.steps)) <= TINY

    def join(self, request: SimulatedRequest, number: int) -> None:
        """With the step that begins now."""
        self.step_began = self.at
        request.joined = self.steps = round(self.steps)
        self.joined += request.joined
        self.newest.append(request)
        heapq.heappush(
            self.ends, (request.joined + request.arrival.answer_tokens - 1, number, request)
        )

    def ended(self) -> SimulatedRequest | None:
        """One that has had its last step."""
        if not self.ends or self.ends[0][0] > self.steps + TINY:
            return None
        _, _, request = heapq.heappop(self.ends)
        self.joined -= request.joined
        return request

    def leased_pages(self, page_size: int) -> int:
        """Those of the prompts, and what the answers have grown by."""
        grown = len(self.ends) * self.steps - self.joined
        return self.prompt_pages + int(max(0.0, grown) / page_size)

    def price(self, costs: Costs, pages: int, busy_prefill: int, speed: float) -> None:
        beside = costs.step[3] * busy_prefill
        self.step_seconds = (costs.step_seconds(len(self.ends), pages) + beside) / speed

    def next_change(self, max_batch: int) -> float | None:
        """When the next request ends, or those that are ready can join."""
        if not self.ends:
            return None
        step = self.ends[0][0]
        if self.ready and len(self.ends) < max_batch:
            step = min(step, math.floor(self.steps + TINY) + 1)
        return self.at + max(0.0, step - self.steps) * self.step_seconds


class BlockCaches:
    def __init__(self, capacity: int) -> None:
        """Of `capacity` blocks a worker."""
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
        """A prompt of these blocks is computed or has come there."""
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

    def leading(self, blocks: Sequence[int], workers: int) -> NDArray[numpy.int64]:
        """How many blocks at the front of a prompt each of the first `workers` holds."""
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


def _spread(groups: list[tuple[int, int]], everyone: int, workers: int) -> NDArray[numpy.int64]:
    """One number a worker. The largest group is written at once: mostly, nearly all are in it."""
    depth, largest = max(groups, key=lambda group: group[1].bit_count())
    found = numpy.full(workers, depth, dtype=numpy.int64)
    if largest != everyone:
        for depth, members in groups:
            if members is not largest:
                _write(found, depth, members)
    return found


def _write(found: NDArray[numpy.int64], depth: int, members: int) -> None:
    while members:
        lowest = members & -members
        found[lowest.bit_length() - 1] = depth
        members ^= lowest

"""Decides which requests hold pages, and which of these the next step runs.

    reserve ─▶ waiting ─grant─▶ travelling ─arrive─▶ ready ─▶ running ─▶ finished
                                                       ▲         │
                                  compute ─▶ preempted └─resume──┘ preempted

A reservation takes the pages of its prompt; a running request grows page by
page. When the pool is full, the youngest arrived request of the last priority is
preempted: it gives its pages back and is recomputed when there is room (prompt
and answer in one forward pass). So no token is lost and the oldest request of
the first priority always advances. A new reservation waits while a preempted
request of the same or an earlier priority waits. A request with local prefill
starts as if it had been preempted.

Background requests have the last priority and never share a step with others. While another
request can run, or a router holds them, they pause: they go back to ready and keep their pages,
until another request needs these.

Cached pages are held by reference: only the other pages of a reservation are
pushed, and only the other pages of a preempted request are recomputed. Preempted
requests that lack the same page are recomputed one after the other, so that it is
computed once. Pages in the second tier are restored first.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Callable

from baton.core.types import AttemptKey
from baton.decode_worker.speculation import Speculation
from baton.engine.page_pool import PagePool
from baton.engine.sequence import Sequence, next_page_pending
from baton.engine.step import Plan

BACKGROUND_SHARE = 4
"""Divides the chunk of background requests: other requests may have to wait for its step."""


def _order(sequence: Sequence) -> tuple[int, int]:
    """The order of requests: by priority, then the older first."""
    return sequence.work.priority, sequence.order


def _priority(sequence: Sequence) -> int:
    return sequence.work.priority


class DecodeScheduler:
    def __init__(
        self,
        pool: PagePool,
        max_batch: int,
        chunk_tokens: int,
        speculation: Speculation | None = None,
        background_batch: int = 0,
    ) -> None:
        """A step has at most `background_batch` background requests; 0: as many as others."""
        self._pool = pool
        self._max_batches = max_batch, min(background_batch or max_batch, max_batch)
        self._chunk_tokens = chunk_tokens
        self._speculation = speculation
        self._waiting: OrderedDict[AttemptKey, Sequence] = OrderedDict()
        self._travelling: dict[AttemptKey, Sequence] = {}
        # Arrived requests, each list sorted by `_order`. Preempted requests hold no pages.
        self._ready: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._running: list[Sequence] = []
        self._orders = itertools.count()
        self.held = False  # background requests pause, even if nothing else can run

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._ready) + len(self._preempted) - self.paused

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def background(self) -> int:
        """Running background requests."""
        return sum(each.work.background for each in self._running)

    @property
    def paused(self) -> int:
        """Background requests that others keep from running."""
        arrived = (*self._ready, *self._preempted)
        return sum(each.work.background for each in arrived) if self._pauses else 0

    @property
    def _pauses(self) -> bool:
        """True if background requests pause. The lists are sorted, so the first request of each
        has its first priority."""
        groups = (self._running, self._ready, self._preempted)
        return self.held or any(group and not group[0].work.background for group in groups)

    @property
    def prefilling(self) -> int:
        """Running requests that have more to compute than their next token."""
        return sum(each.uncomputed > 1 for each in self._running)

    @property
    def travelling(self) -> int:
        return len(self._travelling)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens to compute before the requests here can emit their next token. Excludes
        background requests, which others do not wait for."""
        prompts = (each for each in (*self._preempted, *self._running) if each.uncomputed > 1)
        return sum(each.uncomputed for each in prompts if not each.work.background)

    def reserve(self, sequence: Sequence) -> None:
        """Queues a request whose prompt will be pushed."""
        self._waiting[sequence.work.key] = sequence

    def compute(self, sequence: Sequence) -> None:
        """Queues a request with local prefill."""
        sequence.order = next(self._orders)
        bisect.insort(self._preempted, sequence, key=_order)

    def grant(self) -> list[Sequence]:
        """Reserves pages for waiting prompts, in order. Returns the requests that got theirs."""
        granted = []
        while (first := self._first_waiting()) and not self._waits_for_preempted(first):
            keys, tokens = first.keys_to_find, len(first.tokens)
            if not self._make_room(first, self._cost_to_receive):
                break
            if self._pool.second_tier.restore_pages(keys):
                continue
            del self._waiting[first.work.key]
            first.lease = self._pool.receive(tokens, keys)
            self._travelling[first.work.key] = first
            granted.append(first)
        return granted

    def _cost_to_receive(self, sequence: Sequence) -> int:
        """Includes a page for each request to grow, so that a new one does not cause a preemption
        at once."""
        room = len(self._running) + len(self._ready) + len(self._travelling)
        cost = self._pool.cost_to_receive(len(sequence.tokens), sequence.keys_to_find)
        return cost + room * self._pool.slices

    def _cost_to_compute(self, sequence: Sequence) -> int:
        pages = self._pool.pages_for(len(sequence.tokens))
        return self._pool.cost(pages, sequence.keys_to_find)

    def _waits_for_preempted(self, sequence: Sequence) -> bool:
        return bool(self._preempted) and _priority(self._preempted[0]) <= _priority(sequence)

    def _first_waiting(self) -> Sequence | None:
        """The first reservation that waits for no restore."""
        for each in sorted(self._waiting.values(), key=_priority):
            if not next_page_pending(each.keys_to_find, self._pool, ()):
                return each
        return None

    def arrive(self, key: AttemptKey, first_token: int) -> bool:
        """Makes a request ready when its prompt's pages are in place. Returns False if it is
        unknown."""
        sequence = self._travelling.pop(key, None)
        if sequence is None:
            return False
        sequence.computed = len(sequence.tokens)
        sequence.append(first_token)
        sequence.order = next(self._orders)
        sequence.settle(sequence.computed)
        sequence.lease.share_copies()
        bisect.insort(self._ready, sequence, key=_order)
        return True

    def remove(self, sequence: Sequence) -> bool:
        """Forgets a request and frees its pages. Returns False if they are still being pushed:
        then the caller frees them."""
        key = sequence.work.key
        if self._travelling.pop(key, None) is not None:
            return False
        if self._waiting.pop(key, None) is None:
            groups = (self._running, self._ready, self._preempted)
            next(group for group in groups if sequence in group).remove(sequence)
            if self._speculation:
                self._speculation.end(sequence)
        if not sequence.lease.released:
            sequence.lease.release()
        return True

    def next(self) -> Plan:
        """The next step, oldest request first. Empty when nothing can run."""
        self._pause()
        self._resume()
        while len(self._running) < self._max_batch and self._may_run(self._ready):
            bisect.insort(self._running, self._ready.pop(0), key=_order)
        if not self._grow() or any(each.guessing for each in self._running):
            return {}  # guesses in flight: all requests wait, so that they stay in one step
        plan: Plan = {}
        budget = self._chunk_tokens
        if self._runs_background:
            budget = max(1, budget // BACKGROUND_SHARE)
        for sequence in self._running:
            if sequence.planned_out:
                continue
            # A decoding request always gets its token; only prefill shares the budget.
            count = 1 if sequence.uncomputed == 1 else sequence.cover(budget, self._pool)
            if count:
                plan[sequence] = count
                budget -= count if count > 1 else 0
        return self._with_guesses(plan, min(budget, self._max_batch - len(plan)))

    def _with_guesses(self, plan: Plan, most_rows: int) -> Plan:
        if self._speculation and most_rows > 0:
            if self._speculation.waits(plan, most_rows):
                return {}
            # Without pages that running requests need to grow.
            pages = self._pool.free - len(self._running) * self._pool.slices
            self._speculation.guess(plan, most_rows, self._pool, pages)
        return plan

    @property
    def _max_batch(self) -> int:
        return self._max_batches[self._runs_background]

    @property
    def _runs_background(self) -> bool:
        """True if the next step runs background requests."""
        return bool(self._running) and self._running[0].work.background

    def _pause(self) -> None:
        """Moves running background requests back to ready if they pause."""
        pauses = self._pauses
        while pauses and self._running and self._running[-1].work.background:
            bisect.insort(self._ready, self._running.pop(), key=_order)

    def _may_run(self, arrived: list[Sequence]) -> bool:
        """True if there is a first request and it does not pause."""
        return bool(arrived) and not (arrived[0].work.background and self._pauses)

    def _resume(self) -> None:
        while len(self._running) < self._max_batch and self._may_run(self._preempted):
            if self._preempted[0].expected:
                return
            if self._ready and _order(self._ready[0]) < _order(self._preempted[0]):
                return
            sequence = self._preempted[0]
            keys = sequence.keys_to_find
            if next_page_pending(keys, self._pool, self._running):
                return
            if not self._make_room(sequence, self._cost_to_compute):
                return
            if coming := self._pool.second_tier.restore_pages(keys):
                sequence.restored += coming
                return
            self._preempted.pop(0)
            sequence.lease = self._pool.acquire(self._pool.pages_for(len(sequence.tokens)), keys)
            sequence.computed = sequence.cached_tokens
            bisect.insort(self._running, sequence, key=_order)

    def _grow(self) -> bool:
        """Gives every running request the pages of its next step, oldest first.

        Returns False if that needs pages that in-flight steps still use.
        """
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            tokens = len(sequence.tokens) + sequence.expected
            missing = self._pool.pages_for(tokens) - len(sequence.lease)
            if missing > 0 and not sequence.cover(self._chunk_tokens, self._pool):
                arrived = (*self._running, *self._ready)
                if self._pool.returning or any(each.lease.pinned for each in arrived):
                    return False
                self._preempt_last()
                continue
            index += 1
        return True

    def _make_room(self, sequence: Sequence, cost: Callable[[Sequence], int]) -> bool:
        """Returns True if the pool has the pages that the sequence costs. Other requests take
        them from background requests, the youngest first."""
        while cost(sequence) > self._pool.free:
            last = max(self._last_of_groups, key=_order, default=sequence)
            if sequence.work.background or not last.work.background:
                return False
            if self._pool.returning or last.lease.pinned:
                return False  # until the steps in flight have ended
            self._preempt_last()
        return True

    @property
    def _last_of_groups(self) -> list[Sequence]:
        return [group[-1] for group in (self._running, self._ready) if group]

    def _preempt_last(self) -> None:
        sequence = max(self._last_of_groups, key=_order)
        next(group for group in (self._running, self._ready) if sequence in group).remove(sequence)
        sequence.lease.release()
        sequence.computed = 0
        if self._speculation:
            self._speculation.drop(sequence)
        bisect.insort(self._preempted, sequence, key=_order)

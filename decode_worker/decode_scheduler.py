"""Which requests hold pages, and which of them the next step runs.

    reserve ─▶ waiting ─grant─▶ travelling ─arrive─▶ ready ─▶ running ─▶ finished
                                                       ▲         │
                                  compute ─▶ preempted └─resume──┘ preempted

A reservation takes the pages of its prompt; a running request grows page by
page. When the pool is full, the youngest arrived request is preempted: it gives
its pages back and is recomputed when there is room (prompt and answer in one
forward pass). So no token is lost and the oldest request always advances. New
reservations wait while a preempted request does. A request with local prefill
starts as if it had been preempted.

Cached pages are held by reference: only the other pages of a reservation are
pushed, and only the other pages of a preempted request are recomputed, one
request after the other where they continue alike. Pages in the second tier are
restored first.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from dataclasses import dataclass

from baton.core.page_keys import KeyChain
from baton.core.types import AttemptKey, Work
from baton.engine.page_pool import Lease, PagePool
from baton.engine.sequence import Sequence, next_page_pending
from baton.engine.step import Chunk, Plan


@dataclass(frozen=True, slots=True)
class Reservation:
    """A prompt's pages: the cached ones, then those that prefill will push."""

    work: Work
    lease: Lease
    chain: KeyChain

    @property
    def awaited(self) -> list[int]:
        return self.lease.pages[self.lease.found :]


@dataclass(frozen=True, slots=True)
class _Waiting:
    work: Work
    chain: KeyChain

    @property
    def keys(self) -> list[bytes]:
        return self.chain.to_find(self.work.prompt_tokens)


def _order(sequence: Sequence) -> int:
    return sequence.order


class DecodeScheduler:
    def __init__(self, pool: PagePool, max_batch: int, chunk_tokens: int) -> None:
        self._pool = pool
        self._max_batch = max_batch
        self._chunk_tokens = chunk_tokens
        self._waiting: OrderedDict[AttemptKey, _Waiting] = OrderedDict()
        self._travelling: dict[AttemptKey, Reservation] = {}
        # Arrived requests, each list oldest first. The preempted hold no pages.
        self._ready: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._running: list[Sequence] = []
        self._orders = itertools.count()

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._ready) + len(self._preempted)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def prefilling(self) -> int:
        """Running requests that have more to compute than their next token."""
        return sum(each.uncomputed > 1 for each in self._running)

    @property
    def travelling(self) -> int:
        return len(self._travelling)

    @property
    def queued_tokens(self) -> int:
        """Tokens to compute before the requests here can emit their next one."""
        requests = (*self._preempted, *self._running)
        return sum(each.uncomputed for each in requests if each.uncomputed > 1)

    def reserve(self, work: Work) -> None:
        self._waiting[work.key] = _Waiting(work, self._pool.chain(work.cache_name))

    def grant(self) -> list[Reservation]:
        """Reservations that got their pages now, oldest first."""
        granted = []
        while not self._preempted and (first := self._first_waiting()):
            key, keys = first.work.key, first.keys
            pages = self._pool.pages_for(len(first.work.prompt_tokens))
            # Leaves a page for each request to grow, so that a new one does not cause a
            # preemption at once.
            room = len(self._running) + len(self._ready) + len(self._travelling)
            if self._pool.cost(pages, keys) + room > self._pool.free:
                break
            if self._pool.lower.restore_pages(keys):
                continue
            del self._waiting[key]
            lease = self._pool.acquire(pages, keys)
            self._travelling[key] = Reservation(first.work, lease, first.chain)
            granted.append(self._travelling[key])
        return granted

    def _first_waiting(self) -> _Waiting | None:
        """The oldest reservation that waits for no restore."""
        waiting = self._waiting.values()
        return next(
            (each for each in waiting if not next_page_pending(each.keys, self._pool, ())), None
        )

    def arrive(self, key: AttemptKey, first_token: int) -> Sequence | None:
        """The prompt's pages are in place: the request may run. None when it is unknown."""
        reservation = self._travelling.pop(key, None)
        if reservation is None:
            return None
        prompt = reservation.work.prompt_tokens
        sequence = Sequence(
            work=reservation.work,
            lease=reservation.lease,
            tokens=[*prompt, first_token],
            computed=len(prompt),
            order=next(self._orders),
            chain=reservation.chain,
        )
        sequence.settle(len(prompt))
        sequence.lease.share_copies()
        self._ready.append(sequence)
        return sequence

    def compute(self, work: Work) -> Sequence:
        """Adds a request with local prefill, computed once there is room."""
        lease = self._pool.acquire(0)
        lease.release()
        chain = self._pool.chain(work.cache_name)
        sequence = Sequence(work, lease, order=next(self._orders), chain=chain)
        self._preempted.append(sequence)
        return sequence

    def withdraw(self, key: AttemptKey) -> Reservation | None:
        """Forgets a reservation that has not arrived. The caller frees its pages."""
        self._waiting.pop(key, None)
        return self._travelling.pop(key, None)

    def finish(self, sequence: Sequence) -> None:
        """Forgets an arrived request and frees its pages."""
        if sequence in self._preempted:
            self._preempted.remove(sequence)
            return
        (self._running if sequence in self._running else self._ready).remove(sequence)
        sequence.lease.release()

    def next(self) -> Plan:
        """The next step's pieces, oldest request first. Empty when nothing can run."""
        self._resume()
        while self._ready and len(self._running) < self._max_batch:
            bisect.insort(self._running, self._ready.pop(0), key=_order)
        if not self._grow():
            return []
        plan: Plan = []
        budget = self._chunk_tokens
        for sequence in self._running:
            if sequence.planned_out:
                continue
            # A decoding request always gets its token; only prefill shares the budget.
            count = 1 if sequence.uncomputed == 1 else min(sequence.uncomputed, budget)
            if count:
                plan.append(Chunk(sequence, count))
                budget -= count if count > 1 else 0
        return plan

    def _resume(self) -> None:
        while self._preempted and len(self._running) < self._max_batch:
            if self._preempted[0].expected:
                return
            if self._ready and self._ready[0].order < self._preempted[0].order:
                return
            sequence = self._preempted[0]
            pages = self._pool.pages_for(len(sequence.tokens))
            keys = sequence.chain.to_find(sequence.tokens)
            if next_page_pending(keys, self._pool, self._running):
                return
            if self._pool.cost(pages, keys) > self._pool.free:
                return
            if coming := self._pool.lower.restore_pages(keys):
                sequence.restored += coming
                return
            self._preempted.pop(0)
            sequence.lease = self._pool.acquire(pages, keys)
            sequence.computed = sequence.cached_tokens
            bisect.insort(self._running, sequence, key=_order)

    def _grow(self) -> bool:
        """Gives every running request the pages of its next step, oldest first.

        False when that needs pages which only come back when the in-flight steps have ended.
        """
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            tokens = len(sequence.tokens) + sequence.expected
            missing = self._pool.pages_for(tokens) - len(sequence.lease)
            if missing > self._pool.free:
                if self._pool.returning or any(each.lease.pinned for each in self._running):
                    return False
                self._preempt_youngest()
                continue
            if missing > 0:
                sequence.lease.extend(missing)
            index += 1
        return True

    def _preempt_youngest(self) -> None:
        sequence = (self._ready or self._running).pop()
        sequence.lease.release()
        sequence.computed = 0
        bisect.insort(self._preempted, sequence, key=_order)

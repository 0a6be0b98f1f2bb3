"""Which requests hold pages, and which of them the next step runs.

    reserve ─▶ waiting ─grant─▶ travelling ─arrive─▶ ready ─▶ running ─▶ finished
                                                       ▲         │
                                  compute ─▶ preempted └─resume──┘ preempted

A reservation takes the pages of its prompt and no more; a running request
grows page by page. When the pool is full, the youngest arrived request gives
its pages back and is computed again from its tokens when there is room
(prompt and answer in one go, by the same forward pass), so nothing is lost and
the oldest request always moves on. New reservations wait while a preempted
request does. A request whose prompt is to be computed here comes in as if it
had been preempted.

What the pool has cached is held by reference: of a reservation's pages only the
others have to travel, and of a preempted request's only the others are computed
again, one request after the other where they go on alike. Where either goes on in
the second tier, it waits until those pages have been brought back.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from dataclasses import dataclass

from baton.core.types import AttemptKey, Work
from baton.engine.page_pool import Lease, PagePool
from baton.engine.prefix_cache import KeyChain
from baton.engine.sequence import Sequence, next_page_pending
from baton.engine.step import Chunk, Plan


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages that wait for a prompt to arrive in them, behind those that were found here."""

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
    def reading(self) -> int:
        """Of those that run, the ones that have more to compute than their next token."""
        return sum(each.uncomputed > 1 for each in self._running)

    @property
    def travelling(self) -> int:
        return len(self._travelling)

    @property
    def queued_tokens(self) -> int:
        """Tokens to be computed before requests that are here can write their next."""
        reading = (*self._preempted, *self._running)
        return sum(each.uncomputed for each in reading if each.uncomputed > 1)

    def reserve(self, work: Work) -> None:
        self._waiting[work.key] = _Waiting(work, self._pool.chain(work.cache_name))

    def grant(self) -> list[Reservation]:
        """Reservations whose pages could be had now, oldest first."""
        granted = []
        while not self._preempted and (first := self._first_waiting()):
            key, keys = first.work.key, first.keys
            pages = self._pool.pages_for(len(first.work.prompt_tokens))
            # A page of room for each request that holds some, so that a new
            # one is not paid for at once with a preemption.
            room = len(self._running) + len(self._ready) + len(self._travelling)
            if self._pool.cost(pages, keys) + room > self._pool.free:
                break
            if self._pool.restore_pages(keys):
                continue
            del self._waiting[key]
            lease = self._pool.acquire(pages, keys)
            self._travelling[key] = Reservation(first.work, lease, first.chain)
            granted.append(self._travelling[key])
        return granted

    def _first_waiting(self) -> _Waiting | None:
        """The oldest reservation that no pages are being brought back for."""
        waiting = self._waiting.values()
        return next(
            (each for each in waiting if not next_page_pending(each.keys, self._pool, ())), None
        )

    def arrive(self, key: AttemptKey, first_token: int) -> Sequence | None:
        """The prompt's pages are filled: the request may run. None when it is unknown."""
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
        """A request whose prompt nobody sends: it is computed here, once there is room."""
        lease = self._pool.acquire(0)
        lease.release()
        chain = self._pool.chain(work.cache_name)
        sequence = Sequence(work, lease, order=next(self._orders), chain=chain)
        self._preempted.append(sequence)
        return sequence

    def withdraw(self, key: AttemptKey) -> Reservation | None:
        """Forgets a reservation that has not arrived. Its pages are the caller's to free."""
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
            # A decoding request always gets its one token; only recomputing shares the budget.
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
            if coming := self._pool.restore_pages(keys):
                sequence.restored += coming
                return
            self._preempted.pop(0)
            sequence.lease = self._pool.acquire(pages, keys)
            sequence.computed = sequence.cached_tokens
            bisect.insort(self._running, sequence, key=_order)

    def _grow(self) -> bool:
        """Gives every running request the pages of its next step, the oldest first.

        False when that takes pages which only come back when the steps under way have ended.
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

"""Chooses the prompts that the next step computes, and holds the state of each attempt.

Prompts run in chunks, by priority (the lowest first), then first come, first served: each
step takes up to `chunk_tokens` prompt tokens from the first prompts, several in
one step if they fit. So a prompt waits for at most one chunk of a later
priority. A prompt starts when the pool has room for all the pages that it will
hold at once; until then the prompts behind it wait too, so none is starved.
Pages of layers with windows are taken chunk by chunk; the prompt waits while
none is free.

Background prompts have the last priority. They run in shorter chunks and in steps of their own,
while no other prompt can run and no router holds them. Other prompts do not wait for the pages that
they compute, since they may pause.

Of one priority, cleared prompts start first: a prompt whose ticket has arrived (or that is not
pushed) frees its pages as soon as it is computed, while another may have to
keep them.

Cached pages are not computed again, and no page is computed twice at once: a
prompt that continues like one being computed waits to find those pages in the
cache, and meanwhile the prompts behind it, up to `LOOK_AHEAD`, may start. The same
holds for pages that are being fetched or restored.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from baton.core.types import LAST_PRIORITY, AttemptKey, Pooling
from baton.engine.page_pool import Lease, PagePool
from baton.engine.sequence import next_page_pending
from baton.engine.step import Plan
from baton.v1.timing_pb2 import Chunk
from baton.worker.phase import Job

MOST_CHUNKS = 32
"""Limit of chunks reported for a prompt. Beyond it neighbours are joined in pairs."""

LOOK_AHEAD = 8

LAST_TOKENS = 2048
"""A long prompt's last chunk. The push of its pages hides behind no further compute, so they
should be few."""


class ChunkTimes:
    """How long each chunk of one prompt took."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self._computed = 0
        self._at = 0.0

    def begin(self, cached_tokens: int, now: float) -> None:
        """The first chunk starts after the cached tokens."""
        self._computed, self._at = cached_tokens, now

    def end(self, computed: int, now: float) -> None:
        """A chunk has ended, and `computed` tokens of the prompt are computed now."""
        if len(self.chunks) == MOST_CHUNKS:
            pairs = zip(self.chunks[::2], self.chunks[1::2], strict=True)
            self.chunks = [
                Chunk(tokens=one.tokens + other.tokens, seconds=one.seconds + other.seconds)
                for one, other in pairs
            ]
        self.chunks.append(Chunk(tokens=computed - self._computed, seconds=now - self._at))
        self._computed, self._at = computed, now


@dataclass(slots=True, eq=False)
class PromptFetch:
    """The fetch of one prompt. Its lease holds what the front of the prompt needs: cached pages,
    then awaited ones."""

    keys: Sequence[bytes]
    lease: Lease
    next_key: bytes  # of the first page that is not cached
    before: int  # cached pages at the prompt's front
    began: float
    pages: int = 0  # fetched pages
    seconds: float = 0.0  # duration of the fetch, even if it failed
    under_way: bool = True

    @property
    def awaited(self) -> Sequence[bytes]:
        return self.keys[self.lease.found :]

    @property
    def coming(self) -> set[bytes]:
        """The keys for which prompts with the same continuation wait."""
        return {self.next_key, *self.awaited}

    def used(self, found: int) -> int:
        """Returns how many fetched pages are among the `found` ones at the prompt's front."""
        return max(0, min(self.pages, found - self.before))


@dataclass(slots=True, eq=False)
class PrefillSequence(Job):
    push: bool = False
    chunks: ChunkTimes = field(default_factory=ChunkTimes)
    fetch: PromptFetch | None = None
    delivered: bool = False  # decode's ticket has arrived
    pushed_pages: int = 0  # at the prompt's front

    @property
    def cleared(self) -> bool:
        """True if its pages are freed soon after it is computed."""
        return self.delivered or not self.push


class PrefillScheduler:
    def __init__(
        self,
        pool: PagePool,
        chunk_tokens: int,
        coming: Collection[bytes] = (),
        background_tokens: int = 0,
    ) -> None:
        """`coming` holds the keys of pages that are being fetched at the moment. Chunks of
        background prompts have at most `background_tokens`; 0: as many as others."""
        self._pool = pool
        self._coming = coming
        self._chunk_tokens = chunk_tokens
        self._background_tokens = min(background_tokens or chunk_tokens, chunk_tokens)
        self._waiting: OrderedDict[AttemptKey, PrefillSequence] = OrderedDict()
        self._started: OrderedDict[AttemptKey, PrefillSequence] = OrderedDict()
        self._inputs: dict[AttemptKey, PrefillSequence] = {}  # of the embedding model
        self.held = False  # background prompts pause, unless others wait for their pages
        self._pauses = False  # background prompts pause, as of the last plan

    @property
    def waiting(self) -> int:
        kinds = itertools.chain(self._waiting.values(), self._inputs.values())
        return sum(not self._is_paused(each) for each in kinds)

    @property
    def running(self) -> int:
        return sum(not self._is_paused(each) for each in self._started.values())

    @property
    def background(self) -> int:
        """Running background prompts."""
        return 0 if self._pauses else sum(map(_is_background, self._started.values()))

    @property
    def paused(self) -> int:
        """Background prompts that others keep from running."""
        return sum(map(self._is_paused, self._all))

    def _is_paused(self, sequence: PrefillSequence) -> bool:
        return self._pauses and sequence.work.background

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens not yet computed. Excludes background prompts, which others do not wait
        for."""
        return sum(each.uncomputed for each in self._all if not each.work.background)

    @property
    def waiting_pages(self) -> int:
        """Pages that queued prompts may need."""
        prompts = self._waiting.values()
        return sum(self._pool.cost(self._pool.pages_for(len(each.tokens))) for each in prompts)

    @property
    def cleared_waiting(self) -> bool:
        """True if a cleared prompt waits."""
        return any(each.cleared for each in self._waiting.values())

    def has_started(self, sequence: PrefillSequence) -> bool:
        """True if it has pages and is not computed yet."""
        return sequence.work.key in self._started

    @property
    def _all(self) -> Iterator[PrefillSequence]:
        kinds = (self._waiting, self._started, self._inputs)
        return itertools.chain.from_iterable(each.values() for each in kinds)

    def add(self, sequence: PrefillSequence) -> None:
        encoded = sequence.work.pooling is Pooling.ENCODER
        queue = self._inputs if encoded else self._waiting
        queue[sequence.work.key] = sequence

    def next_inputs(self) -> list[PrefillSequence]:
        """Whole inputs of the embedding model to compute together: as many as fit into a chunk, at
        least one. None while there is a prompt of an earlier priority."""
        batch: list[PrefillSequence] = []
        budget = self._chunk_tokens
        prompts = itertools.chain(self._waiting.values(), self._started.values())
        urgent = min(map(_priority, prompts), default=math.inf) if self._inputs else math.inf
        for sequence in sorted(self._inputs.values(), key=_priority):
            budget -= len(sequence.tokens)
            alone = sequence.work.alone or (batch and batch[0].work.alone)
            if (batch and (budget < 0 or alone)) or urgent < sequence.work.priority:
                break
            if self.held and sequence.work.background:
                break
            batch.append(sequence)
        return batch

    def has_to_wait(self, sequence: PrefillSequence) -> bool:
        """True if the first page that the cache lacks is being computed or fetched."""
        keys, background = sequence.keys_to_find, sequence.work.background
        before = [each for each in self._started.values() if background or not _is_background(each)]
        if next_page_pending(keys, self._pool, before):
            return True
        missing = keys[self._pool.find(keys) :] if self._coming else []
        return bool(missing) and missing[0] in self._coming

    def remove(self, sequence: PrefillSequence) -> None:
        """Forgets an attempt. The caller frees its pages if it had started."""
        self._waiting.pop(sequence.work.key, None)
        self._started.pop(sequence.work.key, None)
        self._inputs.pop(sequence.work.key, None)

    def next(self) -> Plan:
        """The next step, first prompt first. Empty when nothing can run."""
        plan = self._plan(self._chunk_tokens, background=False)
        blocked = not all(map(_is_background, self._waiting.values()))
        self._pauses = bool(plan) or (self.held and not blocked)
        if self._pauses:
            return plan
        return self._plan(self._background_tokens, background=True)

    def _plan(self, budget: int, *, background: bool) -> Plan:
        """Plans either background prompts or the others."""
        plan: Plan = {}
        started = [each for each in self._started.values() if _is_background(each) == background]
        urgent = min(map(_priority, self._waiting.values()), default=math.inf)
        for sequence in sorted(started, key=_priority):
            if urgent < sequence.work.priority:
                budget = self._start(plan, budget, before=sequence.work.priority)
            if budget == 0:
                return plan
            # Nothing is left to plan once the last chunk has been launched.
            if sequence.uncomputed and not sequence.expected:
                budget -= self._add_chunk(plan, sequence, budget)
        self._start(plan, budget, before=math.inf if background else LAST_PRIORITY)
        return plan

    def _start(self, plan: Plan, budget: int, before: float) -> int:
        """Starts waiting prompts of a priority earlier than `before`. Returns the rest of the
        budget."""
        while budget and self._start_next(before):
            budget -= self._add_chunk(plan, next(reversed(self._started.values())), budget)
        return budget

    def _add_chunk(self, plan: Plan, sequence: PrefillSequence, budget: int) -> int:
        count = sequence.cover(budget, self._pool)
        if count == sequence.uncomputed and count >= 2 * LAST_TOKENS:
            count -= LAST_TOKENS
        if count:
            plan[sequence] = count
        return count

    def _start_next(self, before: float) -> bool:
        """Starts a waiting prompt if the pool has room for its pages."""
        sequence = self._choose()
        if sequence is None or sequence.work.priority >= before:
            return False
        keys, pages = sequence.keys_to_find, self._pool.pages_for(len(sequence.tokens))
        growth = sum(
            self._pool.growth(each.lease, len(each.tokens)) for each in self._started.values()
        )
        if self._pool.cost(pages, keys) + growth > self._pool.free:
            return False
        if coming := self._pool.second_tier.restore_pages(keys):
            sequence.restored += coming
            return self._start_next(before)
        del self._waiting[sequence.work.key]
        sequence.lease = self._pool.acquire(pages, keys)
        sequence.computed = sequence.cached_tokens
        self._started[sequence.work.key] = sequence
        return True

    def _choose(self) -> PrefillSequence | None:
        """Returns the first prompt that need not wait for another one."""
        waiting = sorted(
            self._waiting.values(), key=lambda each: (each.work.priority, not each.cleared)
        )
        first = waiting[:LOOK_AHEAD]
        return next((each for each in first if not self.has_to_wait(each)), None)


def _priority(sequence: PrefillSequence) -> int:
    return sequence.work.priority


def _is_background(sequence: PrefillSequence) -> bool:
    return sequence.work.background

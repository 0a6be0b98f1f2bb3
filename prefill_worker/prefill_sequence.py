"""What the prefill phase knows of each attempt, and pages fetched from another worker's cache.

A fetch:

    begin ─▶ under way ─Fetched─▶ pages in the cache, free for the prompt to find
                 │
                 └─ failed, too late, cancelled ─▶ leaving: the holder may still write;
                                                   the pages are freed when the transfer
                                                   thread reports that nothing can arrive

A prompt whose pages are under way waits for them, and so do prompts with the same
continuation. When a fetch fails the prompt is computed: it never fails a request.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.types import AttemptKey
from baton.engine.page_pool import Lease, PagePool
from baton.kv_transfer.transfer_events import Fetched, ReleaseReservation, StartFetch
from baton.kv_transfer.transfer_thread import TransferThread
from baton.v1 import worker_pb2 as pb
from baton.v1.timing_pb2 import Chunk
from baton.worker.metrics import WorkerMetrics
from baton.worker.phase import HeldLeases, Job

MOST_CHUNKS = 32
"""Chunks reported of one prompt. Beyond that neighbours are joined in pairs."""


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
    """The fetch of one prompt. Its lease holds the front of the prompt: cached and awaited
    pages."""

    keys: Sequence[bytes]
    lease: Lease
    began: float
    pages: int = 0  # that arrived
    seconds: float = 0.0  # how long they took, or were waited for
    under_way: bool = True

    @property
    def awaited(self) -> Sequence[bytes]:
        return self.keys[self.lease.found :]

    def used(self, found: int) -> int:
        """How many of the fetched pages are among the `found` at the prompt's front."""
        return max(0, min(self.pages, found - self.lease.found))


@dataclass(slots=True, eq=False)
class PrefillSequence(Job):
    push: bool = False
    chunks: ChunkTimes = field(default_factory=ChunkTimes)
    fetch: PromptFetch | None = None
    delivered: bool = False  # decode's ticket has arrived
    pushed_pages: int = 0

    @property
    def cleared(self) -> bool:
        """Whether its pages will be freed soon after it is computed."""
        return self.delivered or not self.push


class Fetches(HeldLeases):
    """The fetches whose pages are not free yet."""

    def __init__(self, pool: PagePool, transfer: TransferThread, metrics: WorkerMetrics) -> None:
        super().__init__(written=True)
        self._pool = pool
        self._transfer = transfer
        self._metrics = metrics
        self._fetches: dict[AttemptKey, PromptFetch] = {}
        # The keys of pages under way.
        self.coming: Counter[bytes] = Counter()

    def begin(
        self, key: AttemptKey, holder: pb.Holder, keys: Sequence[bytes]
    ) -> PromptFetch | None:
        """Asks the holder for the uncached ones of a prompt's first pages, for which the pool must
        have room. None when all are cached."""
        keys = keys[: holder.pages]
        lease = self._pool.hold(keys)
        fetch = PromptFetch(keys, lease, time.monotonic())
        if not fetch.awaited:
            lease.release()
            return None
        lease.extend(len(fetch.awaited))
        self.hold(key, lease)
        self._fetches[key] = fetch
        self.coming.update(fetch.awaited)
        self._ask(key, fetch, holder)
        return fetch

    def _ask(self, key: AttemptKey, fetch: PromptFetch, holder: pb.Holder) -> None:
        # A holder that is silent for a lease is not waited for any longer.
        most = self._transfer.lease_seconds
        seconds = holder.seconds if 0 < holder.seconds < most else most
        pages = fetch.lease.fresh
        ticket = self._transfer.ticket(key, pages, seconds)
        self._transfer.post(StartFetch(key, holder.agent, ticket, pages, fetch.awaited, seconds))

    def arrive(self, event: Fetched) -> None:
        """Adds the pages to the cache, whether or not the prompt is still wanted."""
        fetch = self._fetches[event.key]
        if fetch.under_way:
            self._end(fetch)
        fetch.pages, fetch.seconds = event.pages, event.seconds
        fetch.lease.name(fetch.keys[: fetch.lease.found + event.pages])
        self._metrics.fetched(event.pages, event.seconds)
        self.free(event.key)

    def fail(self, key: AttemptKey) -> None:
        """Nothing usable will arrive. The pages are held until `free`."""
        fetch = self._fetches.get(key)
        if fetch is not None and fetch.under_way:
            self._end(fetch)
            self._metrics.fetch_failed(fetch.seconds)

    def cancel(self, key: AttemptKey) -> None:
        """The prompt is not wanted any more."""
        fetch = self._fetches.get(key)
        if fetch is not None and fetch.under_way:
            self._end(fetch)
            self._transfer.post(ReleaseReservation(key))

    def free(self, key: AttemptKey) -> None:
        self._fetches.pop(key, None)
        super().free(key)

    def _end(self, fetch: PromptFetch) -> None:
        fetch.under_way = False
        fetch.seconds = time.monotonic() - fetch.began
        for key in fetch.awaited:
            self.coming[key] -= 1
            if not self.coming[key]:
                del self.coming[key]

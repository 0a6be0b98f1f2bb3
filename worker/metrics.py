"""What a worker measures of itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.v1 import worker_pb2 as pb
from core import metrics as names
from core.types import Role
from engine.page_pool import PagePool
from worker.tier_metrics import TierMetrics

_LABELS = ["worker", "role"]


class WorkerMetrics:
    """Written by the engine thread, read by whoever scrapes the registry."""

    def __init__(self, worker_id: str, role: Role) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"worker": worker_id, "role": role.value}
        self._pages = Gauge(
            names.PAGES, names.HELP[names.PAGES], [*_LABELS, "state"], registry=self.registry
        )
        self._waiting = self._gauge(names.WAITING)
        self._running = self._gauge(names.RUNNING)
        self._queue = self._histogram(names.QUEUE_SECONDS, names.LATENCY_BUCKETS)
        self._step = self._histogram(names.STEP_SECONDS, names.LATENCY_BUCKETS)
        self._batch = self._histogram(names.BATCH_SIZE, names.BATCH_BUCKETS)
        self._tokens = self._counter(names.COMPUTED_TOKENS)
        self._bytes = self._counter(names.TRANSFER_BYTES)
        self._seconds = self._counter(names.TRANSFER_SECONDS)
        self._damaged = self._counter(names.DAMAGED_PAGES)
        self._fetched = self._counter(names.FETCHED_PAGES)
        self._failed_fetches = self._counter(names.FAILED_FETCHES)
        self._fetch_seconds = self._counter(names.FETCH_SECONDS)
        self._looked_up = self._counter(names.CACHE_QUERIED_TOKENS)
        self._found = self._counter(names.CACHE_HIT_TOKENS)
        self._evicted = self._counter(names.CACHE_EVICTED_PAGES)
        self._counted = (0, 0, 0)  # what the last three have been told
        self._tiers: TierMetrics | None = None  # once there is a second tier

    def damaged(self, pages: int) -> None:
        self._damaged.inc(pages)

    def queued(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def step(self, requests: int, tokens: int, seconds: float) -> None:
        self._batch.observe(requests)
        self._tokens.inc(tokens)
        self._step.observe(seconds)

    def transferred(self, count: int, seconds: float) -> None:
        self._bytes.inc(count)
        self._seconds.inc(seconds)

    def fetched(self, pages: int, seconds: float) -> None:
        self._fetched.inc(pages)
        self._fetch_seconds.inc(seconds)

    def fetch_failed(self, seconds: float) -> None:
        self._failed_fetches.inc()
        self._fetch_seconds.inc(seconds)

    def load(self, load: pb.Load) -> None:
        self._waiting.set(load.waiting)
        self._running.set(load.running)
        for state in ("free", "leased", "quarantined", "cached"):
            self._pages.labels(**self._labels, state=state).set(getattr(load, f"{state}_pages"))

    def cache(self, pool: PagePool) -> None:
        cache = pool.cache
        counts = (
            cache.looked_up * pool.page_size,
            cache.found * pool.page_size,
            cache.evictions,
        )
        counters = (self._looked_up, self._found, self._evicted)
        for counter, now, before in zip(counters, counts, self._counted, strict=True):
            counter.inc(now - before)
        self._counted = counts
        if pool.second_tier is not None:
            self._tiers = self._tiers or TierMetrics(self.registry, self._labels)
            self._tiers.note(pool.second_tier)

    def _gauge(self, name: str) -> Gauge:
        return Gauge(name, names.HELP[name], _LABELS, registry=self.registry).labels(**self._labels)

    def _counter(self, name: str) -> Counter:
        counter = Counter(name, names.HELP[name], _LABELS, registry=self.registry)
        return counter.labels(**self._labels)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            name, names.HELP[name], _LABELS, buckets=buckets, registry=self.registry
        )
        return histogram.labels(**self._labels)

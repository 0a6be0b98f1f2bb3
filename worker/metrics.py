"""What a worker measures of itself."""

from __future__ import annotations

from typing import TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.core import metrics as names
from baton.core.types import Role
from baton.engine.page_pool import PagePool
from baton.v1 import worker_pb2 as pb
from baton.worker.tier_metrics import TierMetrics

_LABELS = ["worker", "role"]

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


class WorkerMetrics:
    """Written by the engine thread, read by whoever scrapes the registry."""

    def __init__(self, worker_id: str, role: Role) -> None:
        self.registry = CollectorRegistry()
        self._worker_id = worker_id
        self._known: dict[str, Counter | Gauge | Histogram] = {}  # by name, for all roles
        self._counted = (0, 0, 0)  # what the cache's counters have been told
        self._tiers: TierMetrics | None = None  # once there is a second tier
        self.take_role(role)

    def take_role(self, role: Role) -> None:
        """From here on all is measured of this role. What was counted of another one stays."""
        for gauge in self._known.values():
            if isinstance(gauge, Gauge):
                gauge.clear()
        if self._tiers is not None:
            self._tiers.take_role(role)
        self._labels = {"worker": self._worker_id, "role": role.value}
        self._pages = self._get(Gauge, names.PAGES, [*_LABELS, "state"])
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
        return self._get(Gauge, name, _LABELS).labels(**self._labels)

    def _counter(self, name: str) -> Counter:
        return self._get(Counter, name, _LABELS).labels(**self._labels)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        return self._get(Histogram, name, _LABELS, buckets=buckets).labels(**self._labels)

    def _get(
        self, kind: type[Metric], name: str, labels: list[str], **options: tuple[float, ...]
    ) -> Metric:
        if name not in self._known:
            made = kind(name, names.HELP[name], labels, registry=self.registry, **options)  # type: ignore[arg-type]
            self._known[name] = made
        return cast(Metric, self._known[name])

"""A worker's Prometheus metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.core import metrics as names
from baton.core.types import Role
from baton.engine.page_pool import PagePool
from baton.engine.second_tier import SecondTier, second_tier_of
from baton.engine.tier_copies import Tier, TierCounts
from baton.v1 import worker_pb2 as pb

_LABELS = ["model", "worker", "role"]
_COUNTERS = (
    names.COMPUTED_TOKENS,
    names.GUESSED_TOKENS,
    names.ACCEPTED_TOKENS,
    names.GUESSED_STEPS,
    names.DRAFT_SECONDS,
    names.DRAFT_GUESSES,
    names.DRAFT_RIGHT,
    names.TRANSFER_BYTES,
    names.TRANSFER_SECONDS,
    names.DAMAGED_PAGES,
    names.FETCHED_PAGES,
    names.FAILED_FETCHES,
    names.FETCH_SECONDS,
)
_CACHE_COUNTERS = (
    names.CACHE_QUERIED_TOKENS,
    names.CACHE_HIT_TOKENS,
    names.CACHE_EVICTED_PAGES,
)
_GAUGES = (names.WAITING, names.RUNNING)
_HISTOGRAMS = {
    names.QUEUE_SECONDS: names.LATENCY_BUCKETS,
    names.STEP_SECONDS: names.LATENCY_BUCKETS,
    names.BATCH_SIZE: names.BATCH_BUCKETS,
}


def _gauge(registry: CollectorRegistry, name: str, *labels: str) -> Gauge:
    return Gauge(name, names.HELP[name], [*_LABELS, *labels], registry=registry)


def _counter(registry: CollectorRegistry, name: str, *labels: str) -> Counter:
    return Counter(name, names.HELP[name], [*_LABELS, *labels], registry=registry)


class WorkerMetrics:
    """Written by the engine thread, scraped from any."""

    def __init__(self, worker_id: str, role: Role, model: str = "") -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._worker_id = worker_id
        self._cache_counts = (0, 0, 0)  # as last reported
        self._tiers: TierMetrics | None = None  # once there is a second tier
        self._adapter_events: dict[str, int] = {}  # as last reported
        self._adapters = _counter(self.registry, names.ADAPTER_EVENTS, "event")
        self._all_pages = _gauge(self.registry, names.PAGES, "state")
        self._all_gauges = {name: _gauge(self.registry, name) for name in _GAUGES}
        self._all_counters = {
            name: _counter(self.registry, name) for name in (*_COUNTERS, *_CACHE_COUNTERS)
        }
        self._all_histograms = {
            name: Histogram(
                name, names.HELP[name], _LABELS, registry=self.registry, buckets=buckets
            )
            for name, buckets in _HISTOGRAMS.items()
        }
        self.set_role(role)

    def set_role(self, role: Role) -> None:
        """Labels everything with this role from now on. Counts of the other role stay."""
        for gauge in (self._all_pages, *self._all_gauges.values()):
            gauge.clear()
        worker = {"worker": self._worker_id, "role": role.value}
        self._labels = {"model": self._model, **worker}
        if self._tiers is not None:
            self._tiers.set_labels(self._labels)
        counters, histograms = self._all_counters.items(), self._all_histograms.items()
        self._gauges = {
            name: each.labels(**self._labels) for name, each in self._all_gauges.items()
        }
        self._counters = {name: each.labels(**self._labels) for name, each in counters}
        self._histograms = {name: each.labels(**self._labels) for name, each in histograms}

    def damaged(self, pages: int) -> None:
        self._counters[names.DAMAGED_PAGES].inc(pages)

    def queued(self, seconds: float) -> None:
        self._histograms[names.QUEUE_SECONDS].observe(seconds)

    def step(self, requests: int, tokens: int, seconds: float) -> None:
        self._histograms[names.BATCH_SIZE].observe(requests)
        self._counters[names.COMPUTED_TOKENS].inc(tokens)
        self._histograms[names.STEP_SECONDS].observe(seconds)

    def guessed(self, tokens: int, accepted: int) -> None:
        self._counters[names.GUESSED_TOKENS].inc(tokens)
        self._counters[names.ACCEPTED_TOKENS].inc(accepted)
        self._counters[names.GUESSED_STEPS].inc()

    def drafted(self, seconds: float, guesses: int, right: int) -> None:
        self._counters[names.DRAFT_SECONDS].inc(seconds)
        self._counters[names.DRAFT_GUESSES].inc(guesses)
        self._counters[names.DRAFT_RIGHT].inc(right)

    def transferred(self, count: int, seconds: float) -> None:
        self._counters[names.TRANSFER_BYTES].inc(count)
        self._counters[names.TRANSFER_SECONDS].inc(seconds)

    def fetched(self, pages: int, seconds: float) -> None:
        self._counters[names.FETCHED_PAGES].inc(pages)
        self._counters[names.FETCH_SECONDS].inc(seconds)

    def fetch_failed(self, seconds: float) -> None:
        self._counters[names.FAILED_FETCHES].inc()
        self._counters[names.FETCH_SECONDS].inc(seconds)

    def load(self, load: pb.Load) -> None:
        self._gauges[names.WAITING].set(load.waiting + load.paused)
        self._gauges[names.RUNNING].set(load.running)
        for state in ("free", "leased", "quarantined", "cached"):
            pages = self._all_pages.labels(**self._labels, state=state)
            pages.set(getattr(load, f"{state}_pages"))

    def adapters(self, events: Mapping[str, int]) -> None:
        for event, count in events.items():
            new = count - self._adapter_events.get(event, 0)
            self._adapters.labels(**self._labels, event=event).inc(new)
        self._adapter_events = dict(events)

    def cache(self, pool: PagePool) -> None:
        cache, size = pool.cache, pool.page_size
        counts = (cache.looked_up * size, cache.found * size, cache.evictions)
        for name, now, before in zip(_CACHE_COUNTERS, counts, self._cache_counts, strict=True):
            self._counters[name].inc(now - before)
        self._cache_counts = counts
        if (second_tier := second_tier_of(pool)) is not None:
            self._tiers = self._tiers or TierMetrics(self.registry, self._labels)
            self._tiers.update(second_tier)


class TierMetrics:
    """Metrics of a worker's second tier."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._labels = labels
        self._pages = _gauge(registry, names.TIER_PAGES, "tier")
        self._bytes = _gauge(registry, names.TIER_BYTES, "tier")
        self._failing = _gauge(registry, names.FILES_FAILING)
        self._events = _counter(registry, names.TIER_EVENTS, "tier", "event")
        self._reported = {tier: TierCounts() for tier in Tier}

    def set_labels(self, labels: dict[str, str]) -> None:
        self._labels = labels
        for gauge in (self._pages, self._bytes, self._failing):
            gauge.clear()

    def update(self, second: SecondTier) -> None:
        self._set_size(second, Tier.HOST)
        if second.files is not None:
            self._set_size(second, Tier.FILES)
            self._failing.labels(**self._labels).set(second.files.failing)
        for tier, counts in second.counts.items():
            now, before = dataclasses.asdict(counts), dataclasses.asdict(self._reported[tier])
            for event, count in now.items():
                counter = self._events.labels(**self._labels, tier=tier, event=event)
                counter.inc(count - before[event])
            self._reported[tier] = TierCounts(**now)

    def _set_size(self, second: SecondTier, tier: Tier) -> None:
        self._pages.labels(**self._labels, tier=tier).set(len(second.tiers[tier].cache))
        self._bytes.labels(**self._labels, tier=tier).set(second.size(tier))

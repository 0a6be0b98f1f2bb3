"""A router's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.core import metrics as names
from baton.core.errors import (
    BatonError,
    DeadlineExceeded,
    Exhausted,
    Internal,
    PoisonRequest,
    Unavailable,
    WorkerLost,
)
from baton.router.observe.trends import TokenTimes
from baton.router.placement.placement import Placement
from baton.router.workers.link import WorkerLink
from baton.v1 import worker_pb2 as pb


class CacheMetrics:
    """Metrics of the response cache, which the models of a router share."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = registry or CollectorRegistry()

        def counter(name: str) -> Counter:
            return Counter(name, names.HELP[name], ["result"], registry=registry)

        self.response_lookups = counter(names.RESPONSE_LOOKUPS)
        self.response_stores = counter(names.RESPONSE_STORES)
        self.semantic_lookups = counter(names.SEMANTIC_LOOKUPS)
        self.semantic_stores = counter(names.SEMANTIC_STORES)
        self.semantic_verifications = counter(names.SEMANTIC_VERIFICATIONS)
        held = names.SEMANTIC_HELD_SECONDS
        self.semantic_held = Histogram(
            held, names.HELP[held], buckets=names.LATENCY_BUCKETS, registry=registry
        )
        self.response_bytes = Gauge(
            names.RESPONSE_BYTES, names.HELP[names.RESPONSE_BYTES], registry=registry
        )


class MetricsByModel(Collector):
    """The metrics of each model, with its name as a label."""

    def __init__(self) -> None:
        self._models: dict[str, RouterMetrics] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def of(self, model: str, links: Iterable[WorkerLink]) -> RouterMetrics:
        """Adds the metrics of a model and its workers."""
        metrics = self._models[model] = RouterMetrics()
        metrics.watch(links)
        return metrics

    def forget(self, model: str) -> None:
        self._models.pop(model, None)

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for model, metrics in list(self._models.items()):
            for found in metrics.registry.collect():
                family = Metric(found.name, found.documentation, found.type)
                merged.setdefault(found.name, family).samples += [
                    sample._replace(labels={"model": model, **sample.labels})
                    for sample in found.samples
                ]
        return merged.values()


class RouterMetrics:
    """A router's metrics of one model."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ttft = self._histogram(names.TTFT_SECONDS)
        self.tokens = TokenTimes()
        self.registry.register(self.tokens)
        self.tpot = self._histogram(names.TPOT_SECONDS)
        self.e2e = self._histogram(names.E2E_SECONDS)
        self.prompt_tokens = self._counter(names.PROMPT_TOKENS)
        self.requests = self._counter(names.REQUESTS, ["outcome"])
        self.active = Gauge(
            names.ACTIVE_REQUESTS, names.HELP[names.ACTIVE_REQUESTS], registry=self.registry
        )
        self.queued_requests = Gauge(
            names.QUEUED_REQUESTS, names.HELP[names.QUEUED_REQUESTS], registry=self.registry
        )
        self._retries = self._counter(names.RETRIES, ["reason"])
        self._queue = self._histogram(names.PHASE_QUEUE_SECONDS, ["phase"])
        self._prefill = self._histogram(names.PREFILL_SECONDS)
        self._exposed = self._histogram(names.TRANSFER_EXPOSED_SECONDS)
        self._bytes = self._counter(names.TRANSFER_BYTES)
        self._cached = self._counter(names.CACHED_TOKENS, ["where"])
        self._placements = self._counter(names.PLACEMENTS, ["policy", "reason"])
        self._forecast = Histogram(
            names.TTFT_FORECAST_RATIO,
            names.HELP[names.TTFT_FORECAST_RATIO],
            buckets=names.RATIO_BUCKETS,
            registry=self.registry,
        )
        self._seconds = self._counter(names.TRANSFER_SECONDS)
        # Series for alerts begin at 0: Prometheus sees no increase in a series' first value.
        for reason in (Internal.reason, WorkerLost.reason):
            self._retries.labels(reason=reason)
            self.requests.labels(outcome=reason)
        for error in (DeadlineExceeded, Exhausted, PoisonRequest, Unavailable):
            self.requests.labels(outcome=error.reason)

    def watch(self, links: Iterable[WorkerLink]) -> None:
        """Adds the workers' gauges, so that a router's metrics cover the cluster."""
        self.registry.register(_WorkerGauges(links))

    def queued(self, phase: str, seconds: float) -> None:
        self._queue.labels(phase=phase).observe(seconds)

    def prefilled(self, first: pb.FirstToken) -> None:
        self.queued("prefill", first.queue_seconds)
        self._prefill.observe(first.compute_seconds)

    def pushed(self, pushed: pb.Pushed) -> None:
        self._bytes.inc(pushed.bytes)
        self._seconds.inc(pushed.seconds)
        self._exposed.observe(pushed.exposed_seconds)

    def cached(self, where: str, tokens: int) -> None:
        """Counts a prompt's cached tokens, on the worker that prefills ("prefill") or on
        "decode"."""
        self._cached.labels(where=where).inc(tokens)

    def forecast(self, predicted: float, measured: float) -> None:
        """Compares a predicted TTFT with the measured one."""
        self._forecast.observe(predicted / max(measured, 1e-6))

    def placed(self, placement: Placement) -> None:
        self._placements.labels(policy=placement.policy.value, reason=placement.code.value).inc()

    def retried(self, error: BatonError) -> None:
        self._retries.labels(reason=error.reason).inc()

    def _counter(self, name: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, names.HELP[name], labels, registry=self.registry)

    def _histogram(self, name: str, labels: Sequence[str] = ()) -> Histogram:
        return Histogram(
            name, names.HELP[name], labels, buckets=names.LATENCY_BUCKETS, registry=self.registry
        )


class _WorkerGauges(Collector):
    def __init__(self, links: Iterable[WorkerLink]) -> None:
        self._links = links

    def collect(self) -> Iterable[GaugeMetricFamily]:
        labels = ["worker", "role"]
        pages = GaugeMetricFamily(names.PAGES, names.HELP[names.PAGES], labels=[*labels, "state"])
        waiting = GaugeMetricFamily(names.WAITING, names.HELP[names.WAITING], labels=labels)
        running = GaugeMetricFamily(names.RUNNING, names.HELP[names.RUNNING], labels=labels)
        for link in list(self._links):
            role = link.role
            worker = [link.worker_id, role.value if role else "unknown"]
            waiting.add_metric(worker, link.load.waiting + link.load.paused)
            running.add_metric(worker, link.load.running)
            for state in ("free", "leased", "quarantined", "cached"):
                pages.add_metric([*worker, state], getattr(link.load, f"{state}_pages"))
        return [pages, waiting, running]

"""What a router measures: every request's times, with the field's own definitions."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.core import metrics as names
from baton.core.errors import BatonError
from baton.router.placement.placement import Placement
from baton.router.workers.link import WorkerLink
from baton.v1 import worker_pb2 as pb


class RouterMetrics:
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

    def watch(self, links: Iterable[WorkerLink]) -> None:
        """Repeats the workers' own gauges, so that one scrape shows the cluster."""
        self.registry.register(_WorkerGauges(links))

    def queued(self, phase: str, seconds: float) -> None:
        self._queue.labels(phase=phase).observe(seconds)

    def attempt_event(self, event: pb.WorkerMessage) -> None:
        """What a worker says of its times."""
        match event.WhichOneof("kind"):
            case "reserved":
                self.queued("reserve", event.reserved.queue_seconds)
            case "first_token":
                self.queued("prefill", event.first_token.queue_seconds)
                self._prefill.observe(event.first_token.compute_seconds)
            case "pushed":
                self._bytes.inc(event.pushed.bytes)
                self._seconds.inc(event.pushed.seconds)
                self._exposed.observe(event.pushed.exposed_seconds)

    def cached(self, where: str, tokens: int) -> None:
        """So many tokens of a prompt were cached, by its "reader" or on its "decode" worker."""
        self._cached.labels(where=where).inc(tokens)

    def forecast(self, predicted: float, measured: float) -> None:
        """How a predicted time to token #1 compares with what it took."""
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


class TokenTimes(Collector):
    """What is counted for every token, so it has to be cheap: no locks, and only the event loop
    writes."""

    def __init__(self) -> None:
        self._bounds = (*names.LATENCY_BUCKETS, math.inf)
        self._counts = [0] * len(self._bounds)
        self._seconds = 0.0
        self._tokens = 0

    def first(self, count: int) -> None:
        """An answer begins with so many."""
        self._tokens += count

    def more(self, count: int, gap: float) -> None:
        """So many, each `gap` seconds after the one before."""
        self._tokens += count
        self._counts[bisect.bisect_left(self._bounds, gap)] += count
        self._seconds += gap * count

    def collect(self) -> Iterable[Metric]:
        bounds = map(floatToGoString, self._bounds)
        buckets = list(zip(bounds, itertools.accumulate(self._counts), strict=True))
        gaps = HistogramMetricFamily(names.ITL_SECONDS, names.HELP[names.ITL_SECONDS])
        gaps.add_metric([], buckets, self._seconds)
        help_text = names.HELP[names.GENERATION_TOKENS]
        return [gaps, CounterMetricFamily(names.GENERATION_TOKENS, help_text, self._tokens)]


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
            waiting.add_metric(worker, link.load.waiting)
            running.add_metric(worker, link.load.running)
            for state in ("free", "leased", "quarantined", "cached"):
                pages.add_metric([*worker, state], getattr(link.load, f"{state}_pages"))
        return [pages, waiting, running]

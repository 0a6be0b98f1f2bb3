"""The result of a simulation, and the counters it comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.metrics import PERCENTILES, Spread
from baton.planner.sizing import Decision
from baton.router.observe.trends import Histogram

_GROWTH = math.log(1.002)


@dataclass(frozen=True, slots=True)
class PoolUse:
    # Mean number of workers, and the share of their time in which they compute.
    workers: float
    busy: float


@dataclass(frozen=True, slots=True)
class TimedDecision:
    """A decision that changed the pools or the number of missing workers, and its time."""

    seconds: float
    decision: Decision


@dataclass(frozen=True, slots=True)
class SimulationReport:
    requests: int
    seconds: float  # until the last arrival
    hit_rate: float
    ttft: Spread
    # Over all gaps between two tokens.
    itl: Spread
    # The share of requests that met each objective, and both.
    ttft_kept: float
    itl_kept: float
    kept: float
    # Requests per second that met both.
    goodput: float
    prefill: PoolUse
    decode: PoolUse
    mean_batch: float
    # The longest router queue.
    most_queued: int
    decisions: tuple[TimedDecision, ...] = ()


@dataclass(slots=True)
class Tally:
    """Counts while a simulation runs."""

    ttft_limit: float
    itl_limit: float
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_kept: int = 0
    itl_kept: int = 0
    kept: int = 0
    most_queued: int = 0
    # Compute seconds of all decode workers, and these weighted by the batch.
    busy_seconds: float = 0.0
    batch_seconds: float = 0.0
    # Histograms, since there are too many values to keep.
    ttfts: Histogram = field(default_factory=lambda: Histogram(_GROWTH))
    gaps: Histogram = field(default_factory=lambda: Histogram(_GROWTH))

    def answered(self, ttft: float, mean_gap: float) -> None:
        self.requests += 1
        self.ttfts.note(ttft)
        first, others = ttft <= self.ttft_limit, mean_gap <= self.itl_limit
        self.ttft_kept += first
        self.itl_kept += others
        self.kept += first and others

    def report(
        self,
        seconds: float,
        prefill: PoolUse,
        decode: PoolUse,
        decisions: Sequence[TimedDecision],
    ) -> SimulationReport:
        requests = max(self.requests, 1)
        return SimulationReport(
            requests=self.requests,
            seconds=seconds,
            hit_rate=self.cached_tokens / max(self.prompt_tokens, 1),
            ttft=_spread(self.ttfts),
            itl=_spread(self.gaps),
            ttft_kept=self.ttft_kept / requests,
            itl_kept=self.itl_kept / requests,
            kept=self.kept / requests,
            goodput=self.kept / seconds if seconds else 0.0,
            prefill=prefill,
            decode=decode,
            mean_batch=self.batch_seconds / self.busy_seconds if self.busy_seconds else 0.0,
            most_queued=self.most_queued,
            decisions=tuple(decisions),
        )


def _spread(times: Histogram) -> Spread:
    return Spread(times.mean, *(times.percentile(percent / 100) for percent in PERCENTILES))

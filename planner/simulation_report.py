"""The result of a simulation, and the counters it comes from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.metrics import PERCENTILES, Spread
from baton.planner.sizing import Decision

_GROWTH = math.log(1.002)


@dataclass(frozen=True, slots=True)
class PoolUse:
    # Average number of workers, and the share of their time that they compute.
    workers: float
    busy: float


@dataclass(frozen=True, slots=True)
class TimedDecision:
    """A decision that changed something, or was short of workers."""

    seconds: float
    decision: Decision


@dataclass(frozen=True, slots=True)
class SimulationReport:
    requests: int
    # While requests arrived.
    seconds: float
    hit_rate: float
    ttft: Spread
    # Over all gaps between two tokens.
    itl: Spread
    # The share of requests that met each objective, and both.
    ttft_kept: float
    itl_kept: float
    kept: float
    # Requests a second that met both.
    goodput: float
    prefill: PoolUse
    decode: PoolUse
    mean_batch: float
    # The most requests that waited in the router at once.
    most_queued: int
    decisions: tuple[TimedDecision, ...] = ()


class TimeHistogram:
    """Bins that grow by 0.2%: there are too many times to keep."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self._sum = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self._bins[round(math.log(max(seconds, 1e-9)) / _GROWTH)] += count
        self._sum += seconds * count

    def spread(self) -> Spread:
        total = self._bins.total()
        if not total:
            return Spread.of(())
        return Spread(self._sum / total, *(self._percentile(each, total) for each in PERCENTILES))

    def _percentile(self, share: float, total: int) -> float:
        left = share / 100 * total
        for number in sorted(self._bins):
            left -= self._bins[number]
            if left <= 0:
                return math.exp(number * _GROWTH)
        return math.nan


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
    # Compute of all decode workers, and the same times the running requests.
    busy_seconds: float = 0.0
    batch_seconds: float = 0.0
    ttfts: TimeHistogram = field(default_factory=TimeHistogram)
    gaps: TimeHistogram = field(default_factory=TimeHistogram)

    def answered(self, ttft: float, mean_gap: float) -> None:
        self.requests += 1
        self.ttfts.add(ttft)
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
            ttft=self.ttfts.spread(),
            itl=self.gaps.spread(),
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

"""Trends: lengths, times and rates of the last minutes, in buckets of a few seconds; and the demand
that routers report to the planner.

A bucket has counters and sparse histograms whose bins grow by 5%. Percentiles over any number of
buckets come from sums of bins, within 3% of the exact value. Only as many buckets are kept as the
web page shows. TokenTimes counts tokens, which are added to a bucket at its end; everything else
comes from an answer's ledger, at its first token and at its end.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.core import metrics as names
from baton.router.observe.ledger import AnswerLedger
from baton.router.placement.cost_model import Costs
from baton.v1 import cluster_pb2 as pb

BUCKET_SECONDS = 2.0
KEPT_BUCKETS = 150
WINDOW_SECONDS = 60.0
"""The time that a diagnosis covers."""

_GROWTH = math.log(1.05)
_LEAST = 1e-6
_MOST = 1e4
PERCENTILES = (0.5, 0.9, 0.99)


def _bin(value: float, growth: float = _GROWTH) -> int:
    return round(math.log(max(value, _LEAST)) / growth)


class Histogram:
    """Counts positive numbers in sparse bins; `growth` is the logarithm of a bin's width."""

    __slots__ = ("_bins", "_growth", "_sum")

    def __init__(self, growth: float = _GROWTH) -> None:
        self._growth = growth
        self._bins: Counter[int] = Counter()
        self._sum = 0.0

    def note(self, value: float, times: int = 1) -> None:
        self._bins[_bin(value, self._growth)] += times
        self._sum += value * times

    def note_bins(self, bins: Iterable[tuple[int, int]]) -> None:
        """Adds bins and their counts; the mean is then unknown."""
        for number, times in bins:
            self._bins[number] += times

    def add(self, other: Histogram) -> None:
        self._bins.update(other._bins)

    @property
    def mean(self) -> float:
        return self._sum / max(self._bins.total(), 1)

    def percentile(self, share: float) -> float:
        """Returns a percentile; 0 without values."""
        left = share * self._bins.total()
        for number in sorted(self._bins):
            left -= self._bins[number]
            if left <= 0:
                return math.exp(number * self._growth)
        return 0.0

    def spread(self) -> pb.Spread:
        p50, p90, p99 = (self.percentile(share) for share in PERCENTILES)
        return pb.Spread(p50=p50, p90=p90, p99=p99)


@dataclass(slots=True)
class Bucket:
    """The traffic of BUCKET_SECONDS."""

    number: int
    sums: pb.Traffic = field(default_factory=pb.Traffic)  # fields in _SUMS, of complete answers
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    prompt_length: Histogram = field(default_factory=Histogram)
    output_length: Histogram = field(default_factory=Histogram)

    def add(self, other: Bucket) -> None:
        for name in _SUMS:
            setattr(self.sums, name, getattr(self.sums, name) + getattr(other.sums, name))
        for name in _HISTOGRAMS:
            getattr(self, name).add(getattr(other, name))


_HISTOGRAMS = ("ttft", "itl", "prompt_length", "output_length")
_MEANS = tuple(
    f"{part}_seconds"
    for part in ("queue", "prefill_wait", "prefill", "reserve", "exposed", "admit", "ttft")
)
_COUNTS = ("answers", "prompt_tokens", "cached_tokens", "output_tokens", "transferred_bytes")
_SUMS = (*_COUNTS, *_MEANS, "transfer_seconds")


# The ends of bins and of Prometheus' buckets, and the bin of each interval between two of them.
_BIN_ENDS = (math.exp((number + 0.5) * _GROWTH) for number in range(_bin(_LEAST), _bin(_MOST)))
_GAP_BOUNDS = sorted({*names.LATENCY_BUCKETS, *_BIN_ENDS})
_GAP_BINS = [_bin(math.sqrt(low * high)) for low, high in pairwise([_LEAST, *_GAP_BOUNDS, _MOST])]


class TokenTimes(Collector):
    """Counts tokens and the gaps between them. Beside the ledger, this is all that is recorded for
    each token. No locks: only the event loop writes."""

    def __init__(self) -> None:
        self._tokens = 0
        self._gaps = [0] * len(_GAP_BINS)
        self._gap_seconds = 0.0
        # The counts at the last `drain`.
        self._drained_tokens = 0
        self._drained_gaps = list(self._gaps)
        # Called before tokens after `bucket_end` are counted; sets the next end.
        self.on_bucket_end: Callable[[], object] = lambda: None
        self.bucket_end = math.inf

    def add_first(self, count: int, now: float) -> None:
        """Counts the first tokens of an answer."""
        if now >= self.bucket_end:
            self.on_bucket_end()
        self._tokens += count

    def add(self, count: int, gap: float, now: float) -> None:
        """Counts `count` tokens, each `gap` seconds after the previous one."""
        if now >= self.bucket_end:
            self.on_bucket_end()
        self._tokens += count
        self._gaps[bisect_left(_GAP_BOUNDS, gap)] += count
        self._gap_seconds += gap * count

    def drain(self) -> tuple[int, list[tuple[int, int]]]:
        """Returns the tokens and the bins of gaps with their counts since the last call."""
        tokens, self._drained_tokens = self._tokens - self._drained_tokens, self._tokens
        before, self._drained_gaps = self._drained_gaps, list(self._gaps)
        changes = zip(_GAP_BINS, self._gaps, before, strict=True)
        return tokens, [(number, now - then) for number, now, then in changes if now > then]

    def collect(self) -> Iterable[Metric]:
        totals = list(accumulate(self._gaps))
        counts = [totals[_GAP_BOUNDS.index(bound)] for bound in names.LATENCY_BUCKETS]
        bounds = map(floatToGoString, (*names.LATENCY_BUCKETS, math.inf))
        buckets = list(zip(bounds, [*counts, totals[-1]], strict=True))
        gaps = HistogramMetricFamily(names.ITL_SECONDS, names.HELP[names.ITL_SECONDS])
        gaps.add_metric([], buckets, self._gap_seconds)
        help_text = names.HELP[names.GENERATION_TOKENS]
        return [gaps, CounterMetricFamily(names.GENERATION_TOKENS, help_text, self._tokens)]


class Trends:
    def __init__(self, times: TokenTimes, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._times = times
        self._buckets: deque[Bucket] = deque(maxlen=KEPT_BUCKETS)
        times.on_bucket_end = self._bucket
        self._bucket()

    def first_token(self, ledger: AnswerLedger) -> None:
        self._bucket().ttft.note(ledger.first - ledger.arrived)

    def answer(self, ledger: AnswerLedger) -> None:
        """Adds a complete answer."""
        bucket = self._bucket()
        sums = bucket.sums
        sums.answers += 1
        sums.prompt_tokens += ledger.prompt_tokens
        sums.cached_tokens += ledger.cached_tokens
        sums.transferred_bytes += ledger.bytes
        sums.queue_seconds += ledger.queue_seconds
        sums.prefill_wait_seconds += ledger.prefill_wait
        sums.prefill_seconds += ledger.prefill_seconds
        sums.reserve_seconds += ledger.exposed_reserve
        sums.exposed_seconds += max(ledger.exposed_seconds - ledger.exposed_reserve, 0.0)
        sums.admit_seconds += ledger.admit_seconds
        sums.transfer_seconds += ledger.push_seconds
        sums.ttft_seconds += ledger.first - ledger.arrived
        bucket.prompt_length.note(ledger.prompt_tokens)
        bucket.output_length.note(ledger.tokens)

    def traffic(self) -> pb.Traffic:
        """Returns the traffic of the last minute, or since the start if that is shorter."""
        self._fold()
        now = self._clock()
        oldest = int((now - WINDOW_SECONDS) / BUCKET_SECONDS) + 1
        total = Bucket(0)
        for bucket in self._buckets:
            if bucket.number >= oldest:
                total.add(bucket)
        traffic = total.sums
        traffic.seconds = min(WINDOW_SECONDS, now - self._began)
        for name in _MEANS:
            setattr(traffic, name, getattr(traffic, name) / max(traffic.answers, 1))
        for name in _HISTOGRAMS:
            getattr(traffic, name).CopyFrom(getattr(total, name).spread())
        return traffic

    def series(self) -> list[Bucket]:
        """Returns all complete buckets of the last minutes, oldest first, with empty ones."""
        self._fold()
        now = int(self._clock() / BUCKET_SECONDS)
        first = max(now - KEPT_BUCKETS + 1, int(self._began / BUCKET_SECONDS))
        known = {bucket.number: bucket for bucket in self._buckets}
        return [known.get(number) or Bucket(number) for number in range(first, now)]

    def _bucket(self) -> Bucket:
        number = int(self._clock() / BUCKET_SECONDS)
        if not self._buckets or self._buckets[-1].number != number:
            self._fold()
            self._buckets.append(Bucket(number))
            self._times.bucket_end = (number + 1) * BUCKET_SECONDS
        return self._buckets[-1]

    def _fold(self) -> None:
        """Adds newly counted tokens to the last bucket. They belong there: TokenTimes asks for the
        next bucket before it counts a token of it."""
        if self._buckets:
            tokens, gaps = self._times.drain()
            self._buckets[-1].sums.output_tokens += tokens
            self._buckets[-1].itl.note_bins(gaps)


class Demand:
    """Counts this router's traffic since its last report to the planner. No clock."""

    def __init__(self) -> None:
        self._counts = pb.RouterReport()

    def arrive(self, answers: int) -> None:
        """Counts an arriving request, admitted or not."""
        self._counts.arrivals += answers

    def replayed(self, answers: int) -> None:
        """Uncounts answers from the response cache, which were no work for workers."""
        self._counts.arrivals = max(0, self._counts.arrivals - answers)

    def prefilled(self, ledger: AnswerLedger, costs: Costs) -> None:
        """Counts a prefilled prompt, with its estimated cost on a prefill worker; 0 for a local
        prefill."""
        counts = self._counts
        remote = ledger.placement is not None and ledger.placement.prefill
        missing = ledger.prompt_tokens - ledger.cached_tokens
        seconds = costs.prefill.seconds(missing, ledger.cached_tokens) if remote else 0.0
        counts.prompt_seconds.append(seconds)
        known = ledger.prefill_wait + ledger.prefill_seconds + ledger.lost_before
        overhead = ledger.first - ledger.arrived - known - ledger.queue_seconds
        counts.overhead_seconds += max(0.0, overhead)

    def answer(self, ledger: AnswerLedger, pages_held: Callable[[float], float]) -> None:
        """Counts a complete answer. `pages_held` returns the pages of a number of tokens."""
        counts = self._counts
        counts.answers += 1
        counts.answer_tokens += ledger.tokens
        pages = pages_held(ledger.prompt_tokens + ledger.tokens / 2)
        counts.page_tokens += ledger.tokens * pages

    def drain(self) -> pb.RouterReport:
        """Returns the counts since the last call, in a report that the caller completes."""
        counts, self._counts = self._counts, pb.RouterReport()
        return counts

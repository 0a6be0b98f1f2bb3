"""Trends: lengths, times and rates of the last minutes, in buckets of a few seconds.

A bucket has counters and sparse histograms whose bins grow by 5%, so that percentiles over any
number of buckets are sums of bins, within 3% of the exact value. Only as many buckets are kept as
the page shows. Tokens are counted by TokenTimes and added to a bucket when it ends; everything
else comes from an answer's ledger, at its first token and at its end.
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
from baton.v1 import cluster_pb2 as pb

BUCKET_SECONDS = 2.0
KEPT_BUCKETS = 150
WINDOW_SECONDS = 60.0
"""What a diagnosis looks at."""

_GROWTH = math.log(1.05)
_LEAST = 1e-6
_MOST = 1e4
PERCENTILES = (0.5, 0.9, 0.99)


def _bin(value: float) -> int:
    return round(math.log(max(value, _LEAST)) / _GROWTH)


class Histogram:
    """Of positive numbers of any size."""

    __slots__ = ("_bins",)

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def note(self, value: float, times: int = 1) -> None:
        self._bins[_bin(value)] += times

    def note_bins(self, bins: Iterable[tuple[int, int]]) -> None:
        """Adds bins and their counts."""
        for number, times in bins:
            self._bins[number] += times

    def add(self, other: Histogram) -> None:
        self._bins.update(other._bins)

    def percentile(self, share: float) -> float:
        """0 when there is nothing."""
        left = share * self._bins.total()
        for number in sorted(self._bins):
            left -= self._bins[number]
            if left <= 0:
                return math.exp(number * _GROWTH)
        return 0.0

    def spread(self) -> pb.Spread:
        p50, p90, p99 = (self.percentile(share) for share in PERCENTILES)
        return pb.Spread(p50=p50, p90=p90, p99=p99)


@dataclass(slots=True)
class Bucket:
    """Some seconds."""

    number: int
    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    bytes: int = 0
    # Sums over the answers that ended.
    queue: float = 0.0
    prefill_wait: float = 0.0
    prefill: float = 0.0
    reserve: float = 0.0
    exposed: float = 0.0
    admit: float = 0.0
    transfer: float = 0.0
    first: float = 0.0
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    prompts: Histogram = field(default_factory=Histogram)
    outputs: Histogram = field(default_factory=Histogram)

    def add(self, other: Bucket) -> None:
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _HISTOGRAMS:
            getattr(self, name).add(getattr(other, name))


_COUNTS = ("answers", "prompt_tokens", "cached_tokens", "output_tokens", "bytes")
_SECONDS = ("queue", "prefill_wait", "prefill", "reserve", "exposed", "admit", "transfer", "first")
_SUMS = (*_COUNTS, *_SECONDS)
_HISTOGRAMS = ("ttft", "itl", "prompts", "outputs")


# Where a bin ends, or one of Prometheus' buckets; and by interval between two bounds, its bin.
_BIN_ENDS = (math.exp((number + 0.5) * _GROWTH) for number in range(_bin(_LEAST), _bin(_MOST)))
_GAP_BOUNDS = sorted({*names.LATENCY_BUCKETS, *_BIN_ENDS})
_GAP_BINS = [_bin(math.sqrt(low * high)) for low, high in pairwise([_LEAST, *_GAP_BOUNDS, _MOST])]


class TokenTimes(Collector):
    """Counts tokens and the gaps between them: besides the ledger, all that is written per token.
    No locks: only the event loop writes."""

    def __init__(self) -> None:
        self._tokens = 0
        self._gaps = [0] * len(_GAP_BINS)
        self._gap_seconds = 0.0
        # What `take` has returned so far.
        self._taken_tokens = 0
        self._taken_gaps = list(self._gaps)
        # Called before tokens are counted at `bucket_end` or later; sets the next end.
        self.on_bucket_end: Callable[[], object] = lambda: None
        self.bucket_end = math.inf

    def add_first(self, count: int, now: float) -> None:
        """An answer begins with `count` tokens."""
        if now >= self.bucket_end:
            self.on_bucket_end()
        self._tokens += count

    def add(self, count: int, gap: float, now: float) -> None:
        """`count` tokens, each `gap` seconds after the one before."""
        if now >= self.bucket_end:
            self.on_bucket_end()
        self._tokens += count
        self._gaps[bisect_left(_GAP_BOUNDS, gap)] += count
        self._gap_seconds += gap * count

    def take(self) -> tuple[int, list[tuple[int, int]]]:
        """Tokens, and bins of gaps with their counts, since this was last called."""
        tokens, self._taken_tokens = self._tokens - self._taken_tokens, self._tokens
        before, self._taken_gaps = self._taken_gaps, list(self._gaps)
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
        """An answer is complete."""
        bucket = self._bucket()
        bucket.answers += 1
        bucket.prompt_tokens += ledger.prompt_tokens
        bucket.cached_tokens += ledger.cached_tokens
        bucket.bytes += ledger.bytes
        bucket.queue += max(ledger.placed - ledger.ready - ledger.lost_before, 0.0)
        bucket.prefill_wait += ledger.prefill_wait
        bucket.prefill += ledger.prefill_seconds
        bucket.reserve += ledger.exposed_reserve
        bucket.exposed += max(ledger.exposed_seconds - ledger.exposed_reserve, 0.0)
        bucket.admit += ledger.admit_seconds
        bucket.transfer += ledger.push_seconds
        bucket.first += ledger.first - ledger.arrived
        bucket.prompts.note(ledger.prompt_tokens)
        bucket.outputs.note(ledger.tokens)

    def traffic(self) -> pb.Traffic:
        """Of the last minute, or since the start where that is later."""
        self._fold()
        now = self._clock()
        oldest = int((now - WINDOW_SECONDS) / BUCKET_SECONDS) + 1
        total = _total(bucket for bucket in self._buckets if bucket.number >= oldest)
        answers = max(total.answers, 1)
        return pb.Traffic(
            seconds=min(WINDOW_SECONDS, now - self._began),
            answers=total.answers,
            prompt_tokens=total.prompt_tokens,
            cached_tokens=total.cached_tokens,
            output_tokens=total.output_tokens,
            prompt_length=total.prompts.spread(),
            output_length=total.outputs.spread(),
            ttft=total.ttft.spread(),
            itl=total.itl.spread(),
            queue_seconds=total.queue / answers,
            prefill_wait_seconds=total.prefill_wait / answers,
            prefill_seconds=total.prefill / answers,
            reserve_seconds=total.reserve / answers,
            exposed_seconds=total.exposed / answers,
            admit_seconds=total.admit / answers,
            ttft_seconds=total.first / answers,
            transferred_bytes=total.bytes,
            transfer_seconds=total.transfer,
        )

    def series(self) -> list[Bucket]:
        """Every bucket of the last minutes that is over, the oldest first; those in which
        nothing happened too."""
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
        """Adds the tokens counted since to the last bucket, which is theirs: TokenTimes asks for
        the next bucket before it counts a token there."""
        if self._buckets:
            tokens, gaps = self._times.take()
            self._buckets[-1].output_tokens += tokens
            self._buckets[-1].itl.note_bins(gaps)


def _total(buckets: Iterable[Bucket]) -> Bucket:
    total = Bucket(0)
    for bucket in buckets:
        total.add(bucket)
    return total

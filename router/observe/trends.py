"""What the last minutes were like: lengths, times and rates, in buckets of a few seconds.

A bucket has counters and sparse histograms whose bins grow by a twentieth, so that
percentiles of any stretch of time are sums of bins, within 3% of the truth. No
more buckets are kept than the page shows.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from baton.router.observe.ledger import AnswerLedger
from baton.v1 import cluster_pb2 as pb

BUCKET_SECONDS = 2.0
KEPT_BUCKETS = 150
WINDOW_SECONDS = 60.0
"""What a diagnosis looks at."""

_GROWTH = math.log(1.05)
_LEAST = 1e-6
PERCENTILES = (0.5, 0.9, 0.99)


class Histogram:
    """Of positive numbers of any size."""

    __slots__ = ("_bins",)

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def note(self, value: float, times: int = 1) -> None:
        self._bins[round(math.log(max(value, _LEAST)) / _GROWTH)] += times

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


class Trends:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._buckets: deque[Bucket] = deque(maxlen=KEPT_BUCKETS)

    def first_token(self, seconds: float) -> None:
        bucket = self._bucket()
        bucket.ttft.note(seconds)
        bucket.output_tokens += 1

    def next_tokens(self, count: int, gap: float) -> None:
        """So many tokens, each `gap` seconds after the one before."""
        bucket = self._bucket()
        bucket.itl.note(gap, count)
        bucket.output_tokens += count

    def answer(self, ledger: AnswerLedger) -> None:
        """An answer has ended well."""
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
        """Of the last minute, or since the start."""
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
        now = int(self._clock() / BUCKET_SECONDS)
        first = max(now - KEPT_BUCKETS + 1, int(self._began / BUCKET_SECONDS))
        known = {bucket.number: bucket for bucket in self._buckets}
        return [known.get(number) or Bucket(number) for number in range(first, now)]

    def _bucket(self) -> Bucket:
        number = int(self._clock() / BUCKET_SECONDS)
        if not self._buckets or self._buckets[-1].number != number:
            self._buckets.append(Bucket(number))
        return self._buckets[-1]


def _total(buckets: Iterable[Bucket]) -> Bucket:
    total = Bucket(0)
    for bucket in buckets:
        total.add(bucket)
    return total

"""How many workers a load needs: queueing estimates for the two pools.

Prefill is a queue with several servers. The probability of a wait is Erlang's C; the wait is
exponential, and longer the more arrivals and compute vary (Allen and Cunneen). Each worker has its
own queue, but routers choose the worker with the least time, which is close to one queue for all.
A backlog adds compute.

Decode is a batch on each worker. Little's law gives the number of answers that decode at once, the
step time grows with the batch, and the largest batch whose step meets the objective gives the
number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FULL = 0.95
"""Highest busy share of a worker: a busier one would never catch up after a burst."""

SPREADS = 2.0
"""Standard deviations above its mean that a batch may reach: it is larger 2 of 100 times."""

MOST_WORKERS = 100_000


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    # Prompts per second.
    rate: float
    # Compute of each prompt of a window, or of a sample.
    compute_seconds: Sequence[float]
    # Variance of the number of arrivals, divided by its mean: 1 if they are independent.
    dispersion: float = 1.0
    # Queued compute to work off, in seconds per second.
    backlog: float = 0.0

    @property
    def mean_seconds(self) -> float:
        return sum(self.compute_seconds) / len(self.compute_seconds)

    @property
    def busy(self) -> float:
        """Workers that the arrivals keep busy all the time."""
        return self.rate * self.mean_seconds

    @property
    def work(self) -> float:
        """Workers that arrivals and backlog keep busy."""
        return self.busy + self.backlog

    @property
    def variability(self) -> float:
        """Factor on the wait, relative to Poisson arrivals of prompts with exponential compute."""
        mean = self.mean_seconds
        squares = sum(each * each for each in self.compute_seconds) / len(self.compute_seconds)
        return (self.dispersion + squares / (mean * mean) - 1.0) / 2 if mean else 1.0


def prefill_workers(load: PrefillLoad, limit: float, late: float) -> int:
    """Returns the fewest workers that work off the backlog and keep the share of first tokens
    after `limit` at `late` or below."""
    blocked = 1.0  # Erlang's B, here for 0 workers
    for workers in range(1, MOST_WORKERS):
        blocked = load.busy * blocked / (workers + load.busy * blocked)
        if load.work < FULL * workers and _late_share(load, workers, blocked, limit) <= late:
            return workers
    return MOST_WORKERS


def late_share(load: PrefillLoad, workers: int, limit: float) -> float:
    """Returns the share of late prompts among those that an idle worker would serve in time."""
    if load.busy >= workers:
        return 1.0
    blocked = 1.0
    for count in range(1, workers + 1):
        blocked = load.busy * blocked / (count + load.busy * blocked)
    return _late_share(load, workers, blocked, limit)


def _late_share(load: PrefillLoad, workers: int, blocked: float, limit: float) -> float:
    if not load.busy:
        return 0.0
    waits = blocked / (1.0 - load.busy / workers * (1.0 - blocked))
    # Mean seconds of a wait.
    mean = load.mean_seconds * max(load.variability, 0.05) / (workers - load.busy)
    in_time = [limit - each for each in load.compute_seconds if each <= limit]
    if not in_time:
        return 0.0
    return waits * sum(math.exp(-slack / mean) for slack in in_time) / len(in_time)


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    # Answers per second, and tokens of one.
    rate: float
    answer_tokens: float
    # Mean pages of a request while it decodes.
    pages: float
    # A step's fixed seconds, and those of each request in it with its pages.
    step_seconds: float
    request_seconds: float
    # Requests that wait for decode workers now.
    waiting: int = 0

    def batch(self, workers: int) -> float:
        """Returns the mean batch on each of `workers`; infinite if requests pile up."""
        tokens = self.rate * self.answer_tokens / workers
        free = 1.0 - tokens * self.request_seconds
        if free <= 0:
            return math.inf
        return tokens * self.step_seconds / free + self.waiting / workers

    def seconds(self, batch: float) -> float:
        """Returns the seconds of a step with `batch` requests."""
        return self.step_seconds + self.request_seconds * batch

    def largest_batch(self, limit: float, max_batch: int, pool_pages: int) -> float:
        """Returns the most requests that fit and whose step takes at most `limit`. If a single
        request takes longer, more workers cannot help, and only the fit counts."""
        fitting = max(1.0, min(float(max_batch), FULL * pool_pages / max(self.pages, 1.0)))
        in_time = (limit - self.step_seconds) / max(self.request_seconds, 1e-12)
        return min(in_time, fitting) if in_time >= 1.0 else fitting


def decode_workers(load: DecodeLoad, limit: float, max_batch: int, pool_pages: int) -> int:
    """Returns the fewest workers whose batches, with their variation, keep a step within
    `limit`."""
    largest = load.largest_batch(limit, max_batch, pool_pages)
    # With fewer, answers would pile up.
    least = int(load.rate * load.answer_tokens * load.request_seconds) + 1
    for workers in range(least, MOST_WORKERS):
        batch = load.batch(workers)
        if batch + SPREADS * math.sqrt(batch) <= largest:
            return workers
    return MOST_WORKERS

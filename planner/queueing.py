"""How many workers a load needs: queueing estimates for the two pools.

Prefill is a queue with several servers: prompts come at a rate, each takes its compute, and
waits if all workers are busy. The chance to wait is Erlang's; how long the wait lasts is
exponential, and longer the more arrivals and computes vary (Allen and Cunneen). Routers hand
prompts out at once, so each worker has a queue of its own, but to the one where it takes the
least time, which comes close to one queue for all. What waits already is another matter: it
takes so much compute, however it is spread, and workers that catch up with it in time.

Decode is a batch on each worker: Little's law says how many answers are written at once, each
step takes longer the more there are, and the largest batch whose step keeps the objective says
how many workers hold them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FULL = 0.95
"""Of a worker's time; what is planned to be busier never catches up with a burst."""

SPREADS = 2.0
"""Standard deviations by which a batch may be larger than its mean: 98 of 100 times."""

MOST_WORKERS = 100_000


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    # Prompts a second.
    rate: float
    # What each prompt computes, in seconds: all of a window, or a sample.
    compute_seconds: Sequence[float]
    # The variance of the number of arrivals, by its mean: 1 where they are independent.
    dispersion: float = 1.0
    # Compute that waits now and is to be caught up with, in seconds a second.
    backlog: float = 0.0

    @property
    def mean_seconds(self) -> float:
        return sum(self.compute_seconds) / len(self.compute_seconds)

    @property
    def busy(self) -> float:
        """Workers that would be busy all the time."""
        return self.rate * self.mean_seconds

    @property
    def work(self) -> float:
        """The same, until the backlog has been caught up with."""
        return self.busy + self.backlog

    @property
    def variability(self) -> float:
        """By how many times a wait is longer than with independent, exponential prompts."""
        mean = self.mean_seconds
        squares = sum(each * each for each in self.compute_seconds) / len(self.compute_seconds)
        return (self.dispersion + squares / (mean * mean) - 1.0) / 2 if mean else 1.0


def prefill_workers(load: PrefillLoad, limit: float, late: float) -> int:
    """The fewest that catch up with what waits, and with which at most the share `late` of what
    comes has its first token after `limit`."""
    blocked = 1.0  # Erlang's B, for one worker more each time
    for workers in range(1, MOST_WORKERS):
        blocked = load.busy * blocked / (workers + load.busy * blocked)
        if load.work < FULL * workers and _late_share(load, workers, blocked, limit) <= late:
            return workers
    return MOST_WORKERS


def late_share(load: PrefillLoad, workers: int, limit: float) -> float:
    """Of the prompts that could be in time on an idle worker, those that would not be."""
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
    # Of the time that a wait lasts on average, in seconds.
    mean = load.mean_seconds * max(load.variability, 0.05) / (workers - load.busy)
    in_time = [limit - each for each in load.compute_seconds if each <= limit]
    if not in_time:
        return 0.0
    return waits * sum(math.exp(-slack / mean) for slack in in_time) / len(in_time)


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    # Answers a second, and how many steps one takes.
    rate: float
    answer_tokens: float
    # Pages that a request holds on average while it is answered.
    pages: float
    # A step: its own seconds, and those of each request in it with its pages.
    step_seconds: float
    request_seconds: float
    # Requests that wait for room now.
    waiting: int = 0

    def batch(self, workers: int) -> float:
        """Requests that run at once on one of so many workers; infinite where they pile up."""
        tokens = self.rate * self.answer_tokens / workers
        free = 1.0 - tokens * self.request_seconds
        if free <= 0:
            return math.inf
        return tokens * self.step_seconds / free + self.waiting / workers

    def seconds(self, batch: float) -> float:
        """A step with so many requests."""
        return self.step_seconds + self.request_seconds * batch

    def largest_batch(self, limit: float, max_batch: int, pool_pages: int) -> float:
        """The most requests of a worker whose step keeps to `limit`, at least 1. Where a request
        alone does not, no number of workers helps, and it is the most that fit."""
        fitting = max(1.0, min(float(max_batch), FULL * pool_pages / max(self.pages, 1.0)))
        in_time = (limit - self.step_seconds) / max(self.request_seconds, 1e-12)
        return min(in_time, fitting) if in_time >= 1.0 else fitting


def decode_workers(load: DecodeLoad, limit: float, max_batch: int, pool_pages: int) -> int:
    """The fewest whose batches, with what they vary, keep each step to `limit`."""
    largest = load.largest_batch(limit, max_batch, pool_pages)
    # Below this, answers pile up.
    least = int(load.rate * load.answer_tokens * load.request_seconds) + 1
    for workers in range(least, MOST_WORKERS):
        batch = load.batch(workers)
        if batch + SPREADS * math.sqrt(batch) <= largest:
            return workers
    return MOST_WORKERS

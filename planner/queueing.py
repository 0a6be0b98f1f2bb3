"""How many workers a load needs: queueing estimates for the two pools.

Prefill is a queue with several servers. The probability to wait is Erlang's C; the wait is
exponential, and longer the more arrivals and compute vary (Allen and Cunneen). Routers place
prompts at once, so each worker has its own queue; since they choose the one with the least time,
that comes close to one queue for all. A backlog is compute to work off in time, on top.

Decode is a batch on each worker. Little's law says how many answers decode at once, a step takes
longer the more there are, and the largest batch whose step meets the objective says how many
workers are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FULL = 0.95
"""Share of a worker's time: a busier one would never catch up with a burst."""

SPREADS = 2.0
"""Standard deviations that a batch stays within 98 of 100 times."""

MOST_WORKERS = 100_000


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    # Prompts a second.
    rate: float
    # Compute of each prompt: all of a window, or a sample.
    compute_seconds: Sequence[float]
    # Variance of the number of arrivals over its mean: 1 where they are independent.
    dispersion: float = 1.0
    # Queued compute to work off, in seconds a second.
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
        """Factor on the wait with independent, exponential prompts."""
        mean = self.mean_seconds
        squares = sum(each * each for each in self.compute_seconds) / len(self.compute_seconds)
        return (self.dispersion + squares / (mean * mean) - 1.0) / 2 if mean else 1.0


def prefill_workers(load: PrefillLoad, limit: float, late: float) -> int:
    """The fewest workers that work off the backlog, and with which at most the share `late` of
    the arrivals have their first token after `limit`."""
    blocked = 1.0  # Erlang's B, for one worker more each time
    for workers in range(1, MOST_WORKERS):
        blocked = load.busy * blocked / (workers + load.busy * blocked)
        if load.work < FULL * workers and _late_share(load, workers, blocked, limit) <= late:
            return workers
    return MOST_WORKERS


def late_share(load: PrefillLoad, workers: int, limit: float) -> float:
    """The share of late prompts, of those that an idle worker would serve in time."""
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
    # Seconds that a wait lasts on average.
    mean = load.mean_seconds * max(load.variability, 0.05) / (workers - load.busy)
    in_time = [limit - each for each in load.compute_seconds if each <= limit]
    if not in_time:
        return 0.0
    return waits * sum(math.exp(-slack / mean) for slack in in_time) / len(in_time)


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    # Answers a second, and the steps of one.
    rate: float
    answer_tokens: float
    # Pages that a request holds on average while it decodes.
    pages: float
    # A step: its own seconds, and those of each request in it with its pages.
    step_seconds: float
    request_seconds: float
    # Requests that wait for room now.
    waiting: int = 0

    def batch(self, workers: int) -> float:
        """Requests that run at once on one of `workers`; infinite where they pile up."""
        tokens = self.rate * self.answer_tokens / workers
        free = 1.0 - tokens * self.request_seconds
        if free <= 0:
            return math.inf
        return tokens * self.step_seconds / free + self.waiting / workers

    def seconds(self, batch: float) -> float:
        """A step with `batch` requests."""
        return self.step_seconds + self.request_seconds * batch

    def largest_batch(self, limit: float, max_batch: int, pool_pages: int) -> float:
        """The most requests whose step takes `limit` at most, at least 1. Where a single request
        takes longer, no number of workers helps, and it is the most that fit."""
        fitting = max(1.0, min(float(max_batch), FULL * pool_pages / max(self.pages, 1.0)))
        in_time = (limit - self.step_seconds) / max(self.request_seconds, 1e-12)
        return min(in_time, fitting) if in_time >= 1.0 else fitting


def decode_workers(load: DecodeLoad, limit: float, max_batch: int, pool_pages: int) -> int:
    """The fewest workers whose batches, with their variation, keep a step within `limit`."""
    largest = load.largest_batch(limit, max_batch, pool_pages)
    # Below this, answers pile up.
    least = int(load.rate * load.answer_tokens * load.request_seconds) + 1
    for workers in range(least, MOST_WORKERS):
        batch = load.batch(workers)
        if batch + SPREADS * math.sqrt(batch) <= largest:
            return workers
    return MOST_WORKERS

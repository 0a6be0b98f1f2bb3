"""What the planner decides on: what the last window was like, what there is, what is wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.planner.pools import ONE_EACH, Pools
from baton.planner.queueing import DecodeLoad, PrefillLoad
from baton.router.placement.cost_model import Costs

RECOVERY_SECONDS = 30.0
"""Within which a backlog is to be caught up with."""

CLEARLY = 3.0
"""Standard deviations by which what is recent must differ to count as news: one decides every few
seconds, so that twice would be false alarm several times an hour."""


@dataclass(frozen=True, slots=True)
class Goals:
    """The objectives, and what may be done for them."""

    # Seconds to the first token, and between two tokens.
    ttft: float
    itl: float
    # Workers of both pools together.
    most_workers: int
    # Of the requests, how many may miss an objective.
    late: float = 0.02
    least: Pools = ONE_EACH
    # A pool gives workers away only if it could bear so many times its load without them,
    headroom: float = 1.25
    # and drains them only once that has been so for so many rounds.
    patience: int = 30


@dataclass(frozen=True, slots=True)
class Window:
    """What came during some seconds."""

    seconds: float = 0.0
    requests: int = 0
    # The end of it, which says sooner that the load has changed.
    recent_seconds: float = 0.0
    recent_requests: int = 0
    # The variance of the number of arrivals, by its mean: 1 where they are independent.
    dispersion: float = 1.0
    # What each prompt computed in seconds, beyond what was cached: all, or a sample.
    compute_seconds: Sequence[float] = ()
    # The mean answer, and the pages that a request holds on average while it is answered.
    answer_tokens: float = 0.0
    pages: float = 0.0

    @property
    def rate(self) -> float:
        """Requests a second: of the last seconds, where they had clearly more."""
        mean = self.requests / self.seconds
        if not self.recent_seconds:
            return mean
        recent = self.recent_requests / self.recent_seconds
        noise = math.sqrt(self.dispersion * mean / self.recent_seconds)
        return recent if recent > mean + CLEARLY * noise else mean


@dataclass(frozen=True, slots=True)
class Observation:
    have: Pools
    """Workers that serve, or soon will: those that start or change their role count where they
    are going, those that drain do not count."""
    window: Window = field(default_factory=Window)
    # What things cost here, as measured.
    costs: Costs = field(default_factory=Costs)
    max_batch: int = 256
    pool_pages: int = 2**31
    # From a request's arrival to its token #1, what is neither wait nor compute.
    overhead_seconds: float = 0.0
    # Compute of prompts that wait, in seconds.
    queued_seconds: float = 0.0
    # Requests that wait for room on decode workers, there or in a router.
    waiting: int = 0

    def prefill_load(self, times: float = 1.0) -> PrefillLoad:
        window = self.window
        # What a worker works off in any case is no backlog.
        beyond = max(0.0, self.queued_seconds - self.have.prefill)
        return PrefillLoad(
            rate=window.rate * times,
            compute_seconds=window.compute_seconds,
            dispersion=window.dispersion,
            backlog=beyond / RECOVERY_SECONDS,
        )

    def decode_load(self, times: float = 1.0) -> DecodeLoad:
        once, request, page, _ = self.costs.step
        window = self.window
        return DecodeLoad(
            rate=window.rate * times,
            answer_tokens=max(window.answer_tokens, 1.0),
            pages=window.pages,
            step_seconds=once,
            request_seconds=request + page * window.pages,
            waiting=self.waiting,
        )

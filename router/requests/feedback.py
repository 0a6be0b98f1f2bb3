"""What one attempt teaches: how long its parts took, and what was cached.

Workers tell their own times with the messages that they send anyway. They go to
the cost model, the metrics and the request's ledger, beside what was predicted when the request was
placed.
"""

from __future__ import annotations

import time

from baton.core.types import Work
from baton.router.observe.ledger import AnswerLedger
from baton.router.observe.metrics import RouterMetrics
from baton.router.placement.placement import Forecast
from baton.router.placement.placer import Placer
from baton.router.requests.admission import Assignment
from baton.router.workers.link import WorkerLink
from baton.v1 import worker_pb2 as pb

SHORTEST_SECONDS = 1e-6


class Feedback:
    """For one attempt, from when it is made. A canary, of which nothing was predicted, teaches
    nothing."""

    def __init__(
        self,
        work: Work,
        assignment: Assignment,
        placer: Placer,
        metrics: RouterMetrics,
        ledger: AnswerLedger | None = None,
    ) -> None:
        self._tokens = len(work.prompt_tokens)
        self._assignment = assignment
        self._placer = placer
        self._costs = placer.costs
        self._metrics = metrics
        self._ledger = ledger
        self._began = time.monotonic()
        self._prefill_busy_seconds = placer.prefill_busy_seconds
        self._compute_seconds = 0.0
        self._read = False  # the prompt has been

    def take_step(self, tokens: pb.StepTokens) -> None:
        if tokens.queue_seconds:
            self._metrics.queued("decode", tokens.queue_seconds)
        if self._ledger is not None:
            self._ledger.hear_step(tokens)
        if self._read or self._assignment.prefill:
            return
        if forecast := self._assignment.placement.forecast:
            self._note_local(tokens, forecast)

    def take(self, event: pb.WorkerMessage) -> None:
        self._metrics.attempt_event(event)
        if self._ledger is not None:
            self._ledger.hear(event)
        forecast = self._assignment.placement.forecast
        if forecast is None:
            return
        match event.WhichOneof("kind"):
            case "reserved":
                self._note_cached("decode", self._assignment.decode, event.reserved.cached_tokens)
            case "first_token" if not self._read:
                self._note_prefill(event.first_token, forecast)
            case "pushed":
                self._note_push(event.pushed)

    def _note_prefill(self, first: pb.FirstToken, forecast: Forecast) -> None:
        self._compute_seconds = first.compute_seconds
        missing = self._tokens - first.cached_tokens
        pending, seconds = forecast.pending_tokens, first.queue_seconds + first.compute_seconds
        restored = first.restored_tokens
        if first.fetch_seconds:
            # It may have waited for its pages: that says nothing of the queue.
            pending, seconds, restored = 0, first.compute_seconds, 0
            self._note_fetch(first)
        self._costs.note_prefill(missing, first.cached_tokens, pending, seconds, restored)
        self._note_read(first.cached_tokens, forecast)

    def _note_fetch(self, first: pb.FirstToken) -> None:
        """One that came to nothing teaches too, as if all had come when it was given up."""
        fetch, pool = self._assignment.placement.fetch, self._assignment.prefiller.pool
        tokens = first.fetched_tokens or (fetch.tokens if fetch else 0)
        size = tokens // max(pool.layout.page_size, 1) * pool.page_bytes
        self._costs.note_fetch(size, first.fetch_seconds)

    def _note_local(self, tokens: pb.StepTokens, forecast: Forecast) -> None:
        cached = tokens.cached_tokens
        seconds = tokens.queue_seconds + tokens.compute_seconds
        self._costs.note_local(
            self._tokens - cached,
            cached,
            forecast.pending_tokens,
            forecast.running,
            seconds,
            tokens.restored_tokens,
            self._busy_prefill(),
        )
        self._note_read(cached, forecast)

    def _busy_prefill(self) -> float:
        """How many prefill workers were at work on average, since the request was placed."""
        busy = self._placer.prefill_busy_seconds - self._prefill_busy_seconds
        return max(0.0, busy) / max(time.monotonic() - self._began, SHORTEST_SECONDS)

    def _note_read(self, cached_tokens: int, forecast: Forecast) -> None:
        self._read = True
        self._note_cached("reader", self._assignment.prefiller, cached_tokens)
        measured = time.monotonic() - self._began
        self._metrics.forecast(forecast.first_token_seconds, measured)

    def _note_cached(self, where: str, link: WorkerLink | None, tokens: int) -> None:
        self._metrics.cached(where, tokens)
        if link is not None:
            link.prefix_hits.add(self._tokens, tokens)

    def _note_push(self, pushed: pb.Pushed) -> None:
        self._costs.note_push(
            pushed.bytes, pushed.seconds, pushed.exposed_seconds, self._compute_seconds
        )

"""Learns from one attempt: how long its phases took, and what was cached.

Workers report their own times in the messages that they send anyway. They go to the cost model,
the metrics and the request's ledger, beside what was predicted when the request was placed.
"""

from __future__ import annotations

import time

from baton.core.types import Role, Work
from baton.router.observe.ledger import AnswerLedger
from baton.router.observe.metrics import RouterMetrics
from baton.router.placement.placer import Placer
from baton.router.requests.admission import Assignment
from baton.router.workers.link import WorkerLink
from baton.v1 import worker_pb2 as pb

SHORTEST_SECONDS = 1e-6


class Feedback:
    """For one attempt, from its start. A canary has no forecast and teaches the cost model
    nothing."""

    def __init__(
        self,
        work: Work,
        assignment: Assignment,
        placer: Placer,
        metrics: RouterMetrics,
        ledger: AnswerLedger,
    ) -> None:
        self._tokens = len(work.prompt_tokens)
        self._assignment = assignment
        self._forecast = assignment.placement.forecast
        self._placer = placer
        self._costs = placer.costs
        self._metrics = metrics
        self._ledger = ledger
        self._began = time.monotonic()
        self._prefill_busy_seconds = placer.prefill_busy_seconds
        self._compute_seconds = 0.0
        self._prefilled = False

    def note_step(self, step: pb.StepTokens) -> None:
        if step.queue_seconds:
            self._metrics.queued("decode", step.queue_seconds)
        self._ledger.note_step(step)
        if not (self._prefilled or self._assignment.prefill):
            self._note_prompt(Role.DECODE, step)

    def note(self, message: pb.WorkerMessage) -> None:
        match message.WhichOneof("kind"):
            case "reserved":
                reserved = message.reserved
                self._metrics.queued("reserve", reserved.queue_seconds)
                self._ledger.note_reserved()
                self._note_cached("decode", self._assignment.decode, reserved.cached_tokens)
            case "first_token":
                first = message.first_token
                self._metrics.prefilled(first)
                self._ledger.note_first_token(first)
                if not self._prefilled:
                    self._note_prompt(Role.PREFILL, first, first.fetch_seconds)
                    self._note_fetch(first)
            case "pushed":
                self._metrics.pushed(message.pushed)
                self._ledger.note_pushed(message.pushed)
                self._note_push(message.pushed)

    def _note_prompt(
        self, role: Role, message: pb.FirstToken | pb.StepTokens, fetch_seconds: float = 0.0
    ) -> None:
        """The prompt is computed: `message` is its first token, or a local prefill's first step."""
        if self._forecast is None:
            return
        self._prefilled = True
        self._compute_seconds = seconds = message.compute_seconds
        cached, pending, restored = message.cached_tokens, 0, 0
        # With a fetch it may have waited for its pages, which says nothing about the queue.
        if not fetch_seconds:
            seconds += message.queue_seconds
            pending, restored = self._forecast.pending_tokens, message.restored_tokens
        busy = self._busy_prefill() if role is Role.DECODE else 0.0
        missing = self._tokens - cached
        self._costs.note_prompt(role, missing, cached, pending, seconds, restored, busy)
        self._note_cached("prefill", self._assignment.prefiller, cached)
        took = time.monotonic() - self._began
        self._metrics.forecast(self._forecast.first_token_seconds, took)

    def _note_fetch(self, first: pb.FirstToken) -> None:
        """A failed fetch counts as if all pages had arrived when it was given up."""
        if self._forecast is None or not first.fetch_seconds:
            return
        fetch, pool = self._assignment.placement.fetch, self._assignment.prefiller.pool
        tokens = first.fetched_tokens or (fetch.tokens if fetch else 0)
        size = tokens // max(pool.layout.page_size, 1) * pool.page_bytes
        self._costs.note_fetch(size, first.fetch_seconds)

    def _busy_prefill(self) -> float:
        """Average number of busy prefill workers since the request was placed."""
        busy = self._placer.prefill_busy_seconds - self._prefill_busy_seconds
        return max(0.0, busy) / max(time.monotonic() - self._began, SHORTEST_SECONDS)

    def _note_cached(self, where: str, link: WorkerLink | None, tokens: int) -> None:
        if self._forecast is not None:
            self._metrics.cached(where, tokens)
            if link is not None:
                link.assigned.count_prompt(self._tokens, tokens)

    def _note_push(self, pushed: pb.Pushed) -> None:
        if self._forecast is not None:
            self._costs.note_push(
                pushed.bytes, pushed.seconds, pushed.exposed_seconds, self._compute_seconds
            )

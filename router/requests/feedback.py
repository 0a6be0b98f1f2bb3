"""What the router learns from an attempt."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from baton.core.types import Pooling, Role, Work
from baton.router.observe.ledger import AnswerLedger
from baton.router.observe.metrics import RouterMetrics
from baton.router.placement.placement import Forecast
from baton.router.placement.placer import Placer
from baton.router.requests.admission import Assignment
from baton.router.workers.link import WorkerLink
from baton.v1 import worker_pb2 as pb

SHORTEST_SECONDS = 1e-6


@dataclass(slots=True)
class Feedback:
    """Records the phases of one attempt and what was cached, from its start.

    Workers report their times in messages that they send anyway. They go to the cost model, the
    metrics and the request's ledger, together with the forecast of the placement. The cost model
    learns nothing from canaries, which have no forecast, and from prompts that may have paused.
    """

    work: Work
    assignment: Assignment
    placer: Placer
    metrics: RouterMetrics
    ledger: AnswerLedger
    began: float = field(default_factory=time.monotonic)
    prefill_busy_seconds: float = field(init=False)  # of the pool, at the start
    compute_seconds: float = 0.0
    prefilled: bool = False

    def __post_init__(self) -> None:
        self.prefill_busy_seconds = self.placer.prefill_busy_seconds

    @property
    def forecast(self) -> Forecast | None:
        return self.assignment.placement.forecast

    def note_step(self, step: pb.StepTokens) -> None:
        if step.queue_seconds:
            self.metrics.queued("decode", step.queue_seconds)
        self.ledger.note_step(step)
        if not (self.prefilled or self.assignment.prefill):
            self._note_prompt(Role.DECODE, step)

    def note(self, message: pb.WorkerMessage) -> None:
        match message.WhichOneof("kind"):
            case "reserved":
                reserved = message.reserved
                self.metrics.queued("reserve", reserved.queue_seconds)
                self.ledger.note_reserved()
                self._note_cached("decode", self.assignment.decode, reserved.cached_tokens)
            case "first_token":
                first = message.first_token
                self.metrics.prefilled(first)
                self.ledger.note_first_token(first)
                if not self.prefilled:
                    self._note_prompt(Role.PREFILL, first, first.fetch_seconds)
                    self._note_fetch(first)
            case "pushed":
                self.metrics.pushed(message.pushed)
                self.ledger.note_pushed(message.pushed)
                self._note_push(message.pushed)

    def _note_prompt(
        self, role: Role, message: pb.FirstToken | pb.StepTokens, fetch_seconds: float = 0.0
    ) -> None:
        """Learns from a computed prompt. `message` has the first token, of prefill or of a local
        prefill."""
        if self.forecast is None or self.work.pooling is Pooling.ENCODER:
            return  # the embedding model has other costs
        self.prefilled = True
        self.compute_seconds = seconds = message.compute_seconds
        cached, pending, restored = message.cached_tokens, 0, 0
        # With a fetch, part of the wait may have been for pages and not in the queue.
        if not fetch_seconds:
            seconds += message.queue_seconds
            pending, restored = self.forecast.pending_tokens, message.restored_tokens
        busy = self._busy_prefill() if role is Role.DECODE else 0.0
        missing = len(self.work.prompt_tokens) - cached
        self._note_cached("prefill", self.assignment.prefiller, cached)
        if self.work.background and self.assignment.prefiller.paused_at >= self.began:
            return
        self.placer.costs.note_prompt(role, missing, cached, pending, seconds, restored, busy)
        took = time.monotonic() - self.began
        self.metrics.forecast(self.forecast.first_token_seconds, took)

    def _note_fetch(self, first: pb.FirstToken) -> None:
        """Learns from a fetch. A failed one counts as if all pages had arrived at its end."""
        if self.forecast is None or not first.fetch_seconds:
            return
        fetch, pool = self.assignment.placement.fetch, self.assignment.prefiller.pool
        tokens = first.fetched_tokens or (fetch.tokens if fetch else 0)
        size = round(self.placer.pages_held(tokens) * pool.page_bytes)
        self.placer.costs.note_fetch(size, first.fetch_seconds)

    def _busy_prefill(self) -> float:
        """Returns the mean number of busy prefill workers since the placement."""
        busy = self.placer.prefill_busy_seconds - self.prefill_busy_seconds
        return max(0.0, busy) / max(time.monotonic() - self.began, SHORTEST_SECONDS)

    def _note_cached(self, where: str, link: WorkerLink | None, tokens: int) -> None:
        if self.forecast is not None:
            self.metrics.cached(where, tokens)
            if link is not None:
                link.assigned.count_prompt(len(self.work.prompt_tokens), tokens)

    def _note_push(self, pushed: pb.Pushed) -> None:
        if self.forecast is not None:
            self.placer.costs.note_push(
                pushed.bytes, pushed.seconds, pushed.exposed_seconds, self.compute_seconds
            )

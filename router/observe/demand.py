"""What is asked of this router, counted for the planner: taken about once a second, and forgotten.

No I/O and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.router.observe.ledger import AnswerLedger
from baton.router.placement.cost_model import Costs


@dataclass(slots=True)
class Counts:
    """Since they were last taken."""

    arrivals: int = 0
    # What each prompt that was read is believed to have cost a prefill worker, beyond what was
    # cached; 0 of one that a decode worker read.
    prompt_seconds: list[float] = field(default_factory=list)
    # Summed over them: from arrival to token #1, what is neither wait nor compute.
    overhead_seconds: float = 0.0
    # Over the answers that ended: how many, their tokens, and their tokens times the pages that
    # each held on average while it was written.
    answers: int = 0
    answer_tokens: int = 0
    page_tokens: float = 0.0


class Demand:
    def __init__(self) -> None:
        self._counts = Counts()

    def arrive(self, answers: int) -> None:
        """A request has come, whether it is let in or not."""
        self._counts.arrivals += answers

    def prefilled(self, ledger: AnswerLedger, costs: Costs) -> None:
        """A prompt has been prefilled: its first token is here."""
        counts = self._counts
        remote = ledger.placement is not None and ledger.placement.prefill
        missing = ledger.prompt_tokens - ledger.cached_tokens
        seconds = costs.prefill_seconds(missing, ledger.cached_tokens) if remote else 0.0
        counts.prompt_seconds.append(seconds)
        known = ledger.prefill_wait + ledger.prefill_seconds + ledger.lost_before
        queued = max(ledger.placed - ledger.ready - ledger.lost_before, 0.0)
        counts.overhead_seconds += max(0.0, ledger.first - ledger.arrived - known - queued)

    def answer(self, ledger: AnswerLedger, page_size: int) -> None:
        """An answer is complete."""
        counts = self._counts
        counts.answers += 1
        counts.answer_tokens += ledger.tokens
        pages = (ledger.prompt_tokens + ledger.tokens / 2) / page_size
        counts.page_tokens += ledger.tokens * pages

    def take(self) -> Counts:
        """What came since this was last called."""
        counts, self._counts = self._counts, Counts()
        return counts

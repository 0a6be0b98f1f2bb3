"""Measures one answer as its tokens come."""

from __future__ import annotations

from dataclasses import dataclass

from baton.router.observe.demand import Demand
from baton.router.observe.ledger import AnswerLedger
from baton.router.observe.metrics import RouterMetrics
from baton.router.observe.trends import Trends
from baton.router.placement.cost_model import CostModel


@dataclass(frozen=True, slots=True)
class AnswerClock:
    """The times of one answer, from when its request came: kept in its ledger, and counted."""

    metrics: RouterMetrics
    trends: Trends
    demand: Demand
    costs: CostModel
    ledger: AnswerLedger

    def tokens(self, count: int) -> None:
        ledger, before = self.ledger, self.ledger.last
        ledger.take(count)
        if not before:
            self.metrics.tokens.first(count)
            self.metrics.ttft.observe(ledger.first - ledger.arrived)
            self.trends.first_token(ledger.first - ledger.arrived)
            self.demand.read(ledger, self.costs.costs)
        else:
            gap = (ledger.last - before) / count
            self.metrics.tokens.more(count, gap)
            self.trends.next_tokens(count, gap)

    def end(self, page_size: int) -> None:
        """Only whole answers count: a cancelled one has no end."""
        ledger = self.ledger
        self.metrics.e2e.observe(ledger.last - ledger.arrived)
        self.trends.answer(ledger)
        self.demand.answer(ledger, page_size)
        if ledger.tokens > 1:
            self.metrics.tpot.observe((ledger.last - ledger.first) / (ledger.tokens - 1))

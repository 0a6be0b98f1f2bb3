"""What a worker measures of its second tier."""

from __future__ import annotations

import dataclasses

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.core import metrics as names
from baton.core.types import Role
from baton.engine.restore_costs import Tier
from baton.engine.second_tier import Counts, SecondTier

_LABELS = ["worker", "role"]


class TierMetrics:
    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._labels = labels
        by_tier = [*_LABELS, "tier"]
        self._pages = Gauge(
            names.TIER_PAGES, names.HELP[names.TIER_PAGES], by_tier, registry=registry
        )
        self._bytes = Gauge(
            names.TIER_BYTES, names.HELP[names.TIER_BYTES], by_tier, registry=registry
        )
        self._events = Counter(
            names.TIER_EVENTS, names.HELP[names.TIER_EVENTS], [*by_tier, "event"], registry=registry
        )
        self._failing = Gauge(
            names.FILES_FAILING, names.HELP[names.FILES_FAILING], _LABELS, registry=registry
        )
        self._told = {tier: Counts() for tier in Tier}

    def take_role(self, role: Role) -> None:
        self._labels = {**self._labels, "role": role.value}
        for gauge in (self._pages, self._bytes, self._failing):
            gauge.clear()

    def note(self, second: SecondTier) -> None:
        self._note_size(Tier.HOST, len(second.host), second.host_bytes)
        if second.files is not None:
            self._note_size(Tier.FILES, len(second.files), second.files.size)
            self._failing.labels(**self._labels).set(second.files.failing)
        for tier, counts in second.counts.items():
            self._note_events(tier, counts)

    def _note_size(self, tier: Tier, pages: int, size: int) -> None:
        self._pages.labels(**self._labels, tier=tier).set(pages)
        self._bytes.labels(**self._labels, tier=tier).set(size)

    def _note_events(self, tier: Tier, counts: Counts) -> None:
        now, told = dataclasses.asdict(counts), dataclasses.asdict(self._told[tier])
        for event, count in now.items():
            self._events.labels(**self._labels, tier=tier, event=event).inc(count - told[event])
        self._told[tier] = Counts(**now)

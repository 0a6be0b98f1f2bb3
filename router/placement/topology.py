"""Who can be used and who can push to whom, and how that looks to one request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.types import Work
from baton.router.placement.cost_model import CostModel
from baton.router.placement.placement import DecodeView, PrefillView, Suspicion
from baton.router.workers.link import WorkerLink


@dataclass(frozen=True, slots=True)
class Topology:
    """What seldom changes. Made anew when it does."""

    prefill: Sequence[WorkerLink]
    decode: Sequence[WorkerLink]
    # By prefill worker's address, the names of decode workers that it can push to.
    reaches: dict[str, frozenset[str]]
    # Why pairs cannot exchange pages, where they never will.
    mismatches: Sequence[str]

    @classmethod
    def of(cls, prefill: Sequence[WorkerLink], decode: Sequence[WorkerLink]) -> Topology:
        names = [(link.agent, link.worker_id) for link in decode]
        reaches = {
            link.address: frozenset(name for agent, name in names if link.peers.reaches(agent))
            for link in prefill
        }
        mismatches = [
            why for link in prefill for agent, _ in names if (why := link.peers.mismatch(agent))
        ]
        return cls(prefill, decode, reaches, mismatches)

    @property
    def page_size(self) -> int:
        """Tokens a page; 1 when there is nobody to say."""
        return self.decode[0].pool.layout.page_size or 1 if self.decode else 1

    @property
    def page_bytes(self) -> int:
        return self.decode[0].pool.page_bytes if self.decode else 0

    def prefill_views(self, work: Work, suspicion: Suspicion) -> list[PrefillView]:
        size = self.page_size
        return [
            PrefillView(
                worker_id=link.worker_id,
                pending_tokens=link.prompts.queued_tokens,
                reaches=self.reaches[link.address],
                has_room=link.has_room(suspicion),
                cached_tokens=_cached_tokens(link, work, size),
                kept_tokens=_kept_tokens(link, work, size),
            )
            for link in self.prefill
        ]

    def decode_views(self, work: Work, suspicion: Suspicion) -> list[DecodeView]:
        size = self.page_size
        return [
            DecodeView(
                worker_id=link.worker_id,
                requests=max(link.active, link.load.running + link.load.waiting),
                free_pages=link.load.free_pages,
                has_room=link.has_room(suspicion),
                cached_tokens=_cached_tokens(link, work, size),
                kept_tokens=_kept_tokens(link, work, size),
                running=link.load.running - link.load.prefilling,
                waiting=link.load.waiting,
                leased_pages=link.load.leased_pages,
                pending_tokens=link.prompts.queued_tokens,
                reading=link.load.prefilling,
            )
            for link in self.decode
        ]

    @property
    def prefill_busy_seconds(self) -> float:
        """For how long prefill workers have had something to read, summed over them."""
        return sum(link.prompts.busy_seconds for link in self.prefill)

    def teach_step(self, link: WorkerLink, costs: CostModel) -> None:
        """Tells how long a decode worker's recent steps took."""
        stretch = link.pace.drain(self.prefill_busy_seconds, time.monotonic())
        # A step that reads a prompt too says nothing of the others.
        if stretch is None or not link.prompts.was_empty:
            return
        # Of a worker that has just come, more seconds may be new than have passed.
        busy = min(stretch.busy_prefill, len(self.prefill))
        load = link.load
        costs.note_step(load.running, load.leased_pages, busy, stretch.seconds, stretch.steps)


def _cached_tokens(link: WorkerLink, work: Work, page_size: int) -> int:
    """Of the prompt, what the worker need not compute: never its last token."""
    pages = (len(work.prompt_tokens) - 1) // page_size
    return page_size * min(link.cache.leading(work.page_keys), pages)


def _kept_tokens(link: WorkerLink, work: Work, page_size: int) -> int:
    """Of these, what the worker has to bring back."""
    if not link.cache.has_saved:
        return 0
    near = page_size * link.cache.leading_in_pool(work.page_keys)
    return max(0, _cached_tokens(link, work, page_size) - near)

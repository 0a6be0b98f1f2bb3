"""Places requests: builds a snapshot of the cluster for each choice and asks the policy."""

from __future__ import annotations

import asyncio
import math
import time
from operator import attrgetter

import numpy

from baton.core.config import RouterConfig
from baton.core.errors import BatonError, DeadlineExceeded, LayoutMismatch
from baton.core.page_reach import pages_held, windows_of
from baton.core.types import Pooling, Role, Work
from baton.router.placement.cost_model import CostModel
from baton.router.placement.placement import (
    Column,
    DecodeColumns,
    FetchPages,
    LocalPrefill,
    Placement,
    PrefillColumns,
    Snapshot,
    Strategy,
    Suspicion,
    column_of,
    columns_of,
)
from baton.router.placement.policy import choose, why_no_pair
from baton.router.placement.scorer import PredictedSeconds, earliest_answer, earliest_first_token
from baton.router.workers.link import WorkerLink
from baton.router.workers.membership import Membership

UNPROVEN_SECONDS = 5.0
"""After this long without a placement, requests are no longer refused by estimates."""


class Topology:
    """The usable workers, and which can push to which. Rebuilt after each change."""

    def __init__(self, membership: Membership) -> None:
        by_name = attrgetter("worker_id")
        prefill = self.prefill = sorted(membership.usable(Role.PREFILL), key=by_name)
        decode = self.decode = sorted(membership.usable(Role.DECODE), key=by_name)
        self.prefill_ids = [link.worker_id for link in prefill]
        self.decode_ids = [link.worker_id for link in decode]
        # By prefill worker, the decode workers that it can push to.
        self.reaches = [
            frozenset(other.worker_id for other in decode if link.peers.reaches(other.agent))
            for link in prefill
        ]
        # Why pairs can never exchange pages.
        misfits = (link.peers.mismatch(other.agent) for link in prefill for other in decode)
        self.mismatches = list(filter(None, misfits))
        self.faults = {role: membership.faults(role) for role in Role}
        # Tokens and bytes of a page (1 and 0 without decode workers), and each slice's window.
        self.page_size = decode[0].pool.layout.page_size or 1 if decode else 1
        self.page_bytes = decode[0].pool.page_bytes if decode else 0
        self.windows = windows_of(decode[0].pool.layout.windows if decode else ())

    def prefill_columns(self, work: Work, suspicion: Suspicion) -> PrefillColumns:
        rows = [
            (
                link.prompts.queued_tokens,
                link.has_room(suspicion, background=work.background),
                *self._cached(link, work),
            )
            for link in self.prefill
        ]
        columns = PrefillColumns(self.prefill_ids, self.reaches, *columns_of(rows))
        columns.lacks_adapter = _lacking(self.prefill, work)
        return columns

    def decode_columns(self, work: Work, suspicion: Suspicion) -> DecodeColumns:
        rows = []
        for link in self.decode:
            load, assigned, unanswered = link.load, link.active, link.assigned.unanswered
            running, prefilling = load.running, load.prefilling
            if not work.background:  # background requests pause for it
                running, assigned = running - load.background, link.assigned.live
                unanswered = min(unanswered, assigned)
            # The report may be older than the latest requests.
            waiting = max(load.waiting, unanswered)
            cached, saved = self._cached(link, work)
            rows.append(
                (
                    max(assigned, running + waiting),
                    load.free_pages,
                    link.has_room(suspicion, background=work.background),
                    cached,
                    max(0, running - prefilling),
                    waiting,
                    load.leased_pages,
                    link.prompts.queued_tokens,
                    saved,
                    prefilling,
                )
            )
        columns = DecodeColumns(self.decode_ids, *columns_of(rows))
        columns.lacks_adapter = _lacking(self.decode, work)
        return columns

    def _cached(self, link: WorkerLink, work: Work) -> tuple[int, int]:
        """Returns the prompt tokens that the worker need not compute (never the last one), and how
        many of them it must restore."""
        size, cache, keys = self.page_size, link.cache, work.page_keys
        cached = size * min(cache.leading(keys), (len(work.prompt_tokens) - 1) // size)
        if not cache.has_saved:
            return cached, 0
        return cached, max(0, cached - size * cache.leading_in_pool(keys))


def _lacking(links: list[WorkerLink], work: Work) -> Column:
    if work.adapter is None:
        return ()
    lacking = [int(not link.has_adapter(work.adapter.digest)) for link in links]
    return column_of(numpy.array(lacking, numpy.int64))


class Placer:
    def __init__(self, membership: Membership, config: RouterConfig) -> None:
        """Must be made before other listeners of the membership that ask for placements."""
        self._membership = membership
        self._strategy = Strategy(config.policy)
        self._local = LocalPrefill(config.local_prefill)
        self._fetch = FetchPages(config.fetch_pages)
        self._local_prefill_after = config.local_prefill_after
        self._known_topology: Topology | None = None  # None after any change
        self.costs = CostModel()
        self.placed = 0  # requests, so far
        self._placed_at = time.monotonic()  # the last placement
        # Time since which no pair is usable; None while one is.
        self._without_pair_since: float | None = None
        self._note_pair()
        membership.listen(self._membership_changed)
        membership.on_report = self._note_step

    def choose(
        self,
        work: Work,
        suspicion: Suspicion = Suspicion.NONE,
        seconds_left: float = math.inf,
        wait: float = 0.0,
        caution: float = 0.0,
    ) -> Placement | BatonError:
        """Returns the placement, or why the request must wait. Returns DeadlineExceeded if, after
        `wait` seconds in the queue, the answer is predicted to take longer than `seconds_left`.
        `caution` is a share added to predicted waits."""
        snapshot = self._snapshot(work, suspicion)
        if seconds_left < math.inf and self.costs.knows_prompts and not self._unproven:
            answer = earliest_answer(snapshot)
            needed = (1.0 + caution) * (wait + answer.waiting) + answer.own
            if needed > seconds_left:
                return DeadlineExceeded(
                    f"the answer is predicted in {needed:.2f} seconds, and the deadline leaves"
                    f" {max(seconds_left, 0):.2f}"
                )
        return choose(snapshot, one_token=work.tokens_wanted == 1)

    def first_token(self, work: Work) -> PredictedSeconds:
        """Predicts the time to the first token; 0 if unknown."""
        if not self.costs.knows_prompts or self._unproven:
            return PredictedSeconds(0.0, 0.0)
        return earliest_first_token(self._snapshot(work, Suspicion.NONE))

    def note_placed(self, now: float) -> None:
        self.placed += 1
        self._placed_at = now

    @property
    def _unproven(self) -> bool:
        """True if estimates may be stale, since nothing was placed for long. Otherwise an estimate
        that is too high would refuse every request that could correct it."""
        return time.monotonic() - self._placed_at > UNPROVEN_SECONDS

    @property
    def obstacle(self) -> BatonError | None:
        """Why no request can be placed, even with an empty queue; None if requests can be."""
        if self._without_pair_since is None:
            return None
        topology = self._topology
        if topology.decode and self._local is LocalPrefill.ALWAYS:
            return None
        ids = topology.prefill_ids, topology.decode_ids
        why = why_no_pair(*ids, topology.mismatches, topology.faults)
        local = bool(topology.decode) and self._may_prefill_locally()
        return None if local and not isinstance(why, LayoutMismatch) else why

    @property
    def can_place(self) -> bool:
        return self.obstacle is None

    @property
    def prefill_busy_seconds(self) -> float:
        """Seconds during which prefill workers had queued prompts, summed over workers."""
        return sum(link.prompts.busy_seconds for link in self._topology.prefill)

    def pages_held(self, tokens: float) -> float:
        """Returns the pages of a sequence of `tokens` tokens."""
        topology = self._topology
        return pages_held(tokens, topology.page_size, topology.windows)

    def _snapshot(self, work: Work, suspicion: Suspicion) -> Snapshot:
        topology = self._topology
        encoded = work.pooling is Pooling.ENCODER  # only prefill workers run the embedding model
        return Snapshot(
            prefill=topology.prefill_columns(work, suspicion),
            decode=topology.decode_columns(work, suspicion),
            mismatches=topology.mismatches,
            faults=topology.faults,
            local_prefill=not encoded and self._may_prefill_locally(),
            local=LocalPrefill.NEVER if encoded else self._local,
            fetch=self._fetch,
            strategy=self._strategy,
            costs=self.costs.costs,
            turn=self.placed,
            prompt_tokens=len(work.prompt_tokens),
            tokens_wanted=work.tokens_wanted,
            page_size=topology.page_size,
            page_bytes=topology.page_bytes,
            windows=topology.windows,
        )

    @property
    def _topology(self) -> Topology:
        if self._known_topology is None:
            self._known_topology = Topology(self._membership)
        return self._known_topology

    def _note_step(self, link: WorkerLink) -> None:
        """Passes a decode worker's recent step times to the cost model."""
        stretch = link.pace.drain(self.prefill_busy_seconds, time.monotonic())
        # Steps with local prefill take longer, and pages of paused requests are not read.
        if stretch is None or not link.prompts.was_empty or link.load.paused:
            return
        # A prefill worker that has just joined may add more busy seconds than have passed.
        busy = min(stretch.busy_prefill, len(self._topology.prefill))
        load = link.load
        self.costs.note_step(load.running, load.leased_pages, busy, stretch.seconds, stretch.steps)

    def _may_prefill_locally(self) -> bool:
        since = self._without_pair_since
        waited = since is not None and time.monotonic() - since >= self._local_prefill_after
        return waited and self._membership.allows_local_prefill

    def _membership_changed(self) -> None:
        self._known_topology = None
        self._note_pair()

    def _note_pair(self) -> None:
        if self._membership.pairs.any_usable:
            self._without_pair_since = None
        elif self._without_pair_since is None:
            self._without_pair_since = time.monotonic()
            # By then, waiting requests may use local prefill.
            loop = asyncio.get_running_loop()
            loop.call_later(self._local_prefill_after, self._membership.notify)

"""Places requests: keeps what a snapshot of the cluster needs, and asks the policy."""

from __future__ import annotations

import asyncio
import math
import time
from operator import attrgetter

from baton.core.config import RouterConfig
from baton.core.errors import BatonError, DeadlineExceeded
from baton.core.types import Role, Work
from baton.router.placement.cost_model import CostModel
from baton.router.placement.placement import (
    DecodeView,
    FetchPages,
    LocalPrefill,
    Placement,
    PrefillView,
    Snapshot,
    Strategy,
    Suspicion,
)
from baton.router.placement.policy import choose
from baton.router.placement.scorer import earliest_first_token
from baton.router.placement.topology import Topology
from baton.router.workers.membership import Membership


class Placer:
    def __init__(self, membership: Membership, config: RouterConfig) -> None:
        """Made before whatever else listens to the membership and asks for placements."""
        self._membership = membership
        self._strategy = Strategy(config.policy)
        self._local = LocalPrefill(config.local_prefill)
        self._fetch = FetchPages(config.fetch_pages)
        self._local_prefill_after = config.local_prefill_after
        self._known_topology: Topology | None = None  # None after any change
        self.costs = CostModel()
        self.placed = 0  # requests, so far
        # When the last pair was lost, or None while there is one.
        self._without_pair_since: float | None = None
        self._note_pair()
        membership.listen(self._membership_changed)
        membership.listen_reports(lambda link: self._topology.teach_step(link, self.costs))

    def choose(
        self, work: Work, suspicion: Suspicion = Suspicion.NONE, seconds_left: float = math.inf
    ) -> Placement | BatonError:
        """Returns the placement, or why the request must wait. DeadlineExceeded: its first token
        is predicted later than in `seconds_left`."""
        snapshot = self._snapshot(work, suspicion)
        if seconds_left < math.inf and self.costs.knows_prompts:
            needed = earliest_first_token(snapshot)
            if needed > seconds_left:
                return DeadlineExceeded(
                    f"the first token is predicted in {needed:.2f} seconds, and the deadline"
                    f" leaves {max(seconds_left, 0):.2f}"
                )
        return choose(snapshot, one_token=work.tokens_wanted == 1)

    def _snapshot(self, work: Work, suspicion: Suspicion) -> Snapshot:
        topology = self._topology
        return Snapshot(
            prefill=topology.prefill_views(work, suspicion),
            decode=topology.decode_views(work, suspicion),
            mismatches=topology.mismatches,
            local_prefill=self._may_prefill_locally(),
            local=self._local,
            fetch=self._fetch,
            strategy=self._strategy,
            costs=self.costs.costs,
            turn=self.placed,
            prompt_tokens=len(work.prompt_tokens),
            tokens_wanted=work.tokens_wanted,
            page_size=topology.page_size,
            page_bytes=topology.page_bytes,
        )

    @property
    def obstacle(self) -> BatonError | None:
        """Why no request can be placed, even after those before it; None when one can."""
        if self._without_pair_since is None:
            return None
        topology = self._topology
        reaches = topology.reaches
        snapshot = Snapshot(
            [PrefillView(link.worker_id, 0, reaches[link.address]) for link in topology.prefill],
            [DecodeView(link.worker_id, 0, 0) for link in topology.decode],
            topology.mismatches,
            self._may_prefill_locally(),
            self._local,
        )
        found = choose(snapshot)
        return found if isinstance(found, BatonError) else None

    @property
    def can_place(self) -> bool:
        return self.obstacle is None

    @property
    def prefill_busy_seconds(self) -> float:
        """How long prefill workers have had queued prompts, summed over them."""
        return self._topology.prefill_busy_seconds

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._topology.page_size

    @property
    def _topology(self) -> Topology:
        if self._known_topology is None:
            by_name = attrgetter("worker_id")
            prefill = sorted(self._membership.usable(Role.PREFILL), key=by_name)
            decode = sorted(self._membership.usable(Role.DECODE), key=by_name)
            self._known_topology = Topology.of(prefill, decode)
        return self._known_topology

    def _may_prefill_locally(self) -> bool:
        since = self._without_pair_since
        waited = since is not None and time.monotonic() - since >= self._local_prefill_after
        return waited and self._membership.does_without_prefill

    def _membership_changed(self) -> None:
        self._known_topology = None
        self._note_pair()

    def _note_pair(self) -> None:
        if self._membership.pairs.any_usable:
            self._without_pair_since = None
        elif self._without_pair_since is None:
            self._without_pair_since = time.monotonic()
            # Requests may be waiting for local prefill to be allowed.
            loop = asyncio.get_running_loop()
            loop.call_later(self._local_prefill_after, self._membership.notify)

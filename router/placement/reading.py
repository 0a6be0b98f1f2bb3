"""How a prefill worker would read a prompt: from what it has cached, or from what it fetches.

Where a decode worker holds more of the prompt than the prefill worker does, as
after an answer that it has written itself, the prefill worker can fetch those
pages instead of computing them. It does where that is predicted to take less. The
fetch goes on while others are computed, so only what is left of it when the
prompt's turn has come is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.router.placement.placement import (
    DecodeView,
    Fetch,
    FetchPages,
    Forecast,
    PrefillView,
    Snapshot,
    Strategy,
)

ALWAYS_SECONDS = 60.0
"""How long a prompt may wait for pages that are to be fetched whatever they save."""


class Reading(NamedTuple):
    view: PrefillView
    # Of the prompt, what need not be computed.
    cached_tokens: int
    # How long the rest takes to compute, and how long it is from now to token #1.
    compute: float
    first_token: float
    fetch: Fetch | None = None

    def forecast(self) -> Forecast:
        return Forecast(self.first_token, self.view.pending_tokens, 0, self.cached_tokens)


def readings(snapshot: Snapshot, views: Sequence[PrefillView]) -> list[Reading]:
    holders = _holders(snapshot)
    return [_best(snapshot, view, holders) for view in views]


def _holders(snapshot: Snapshot) -> list[DecodeView]:
    """Workers that can be fetched from, those with the longest part of the prompt first."""
    if snapshot.fetch is FetchPages.NEVER or snapshot.strategy is not Strategy.KV_AWARE:
        return []
    holders = [view for view in snapshot.decode if view.near_tokens]
    return sorted(holders, key=lambda view: -view.near_tokens)


def _best(snapshot: Snapshot, view: PrefillView, holders: Sequence[DecodeView]) -> Reading:
    plain = _read(snapshot, view)
    holder = next((each for each in holders if each.worker_id in view.reaches), None)
    if holder is None or holder.near_tokens <= view.cached_tokens:
        return plain
    return _read_fetched(snapshot, plain, holder) or plain


def _read(snapshot: Snapshot, view: PrefillView) -> Reading:
    cached, costs = view.cached_tokens, snapshot.costs
    compute = costs.prefill_seconds(snapshot.prompt_tokens - cached, cached)
    before = costs.wait_seconds(view.pending_tokens, view.kept_tokens)
    return Reading(view, cached, compute, compute + before)


def _read_fetched(snapshot: Snapshot, plain: Reading, holder: DecodeView) -> Reading | None:
    """None where computing takes less."""
    size, costs, view = snapshot.page_size, snapshot.costs, plain.view
    near = holder.near_tokens
    # What the prefill worker keeps in its second tier is fetched too, not brought back.
    tokens = near - (view.cached_tokens - view.kept_tokens)
    compute = costs.prefill_seconds(snapshot.prompt_tokens - near, near)
    wait = costs.wait_seconds(view.pending_tokens)
    late = costs.fetch_seconds(tokens // size * snapshot.page_bytes) - wait
    first_token = compute + wait + max(late, 0.0)
    always = snapshot.fetch is FetchPages.ALWAYS
    if first_token >= plain.first_token and not always:
        return None
    saved = ALWAYS_SECONDS if always else plain.first_token - (compute + wait)
    fetch = Fetch(holder.worker_id, near // size, tokens, saved)
    return Reading(view, near, compute, first_token, fetch)

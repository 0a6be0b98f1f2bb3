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

from router.placement import (
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
    plain = _read(snapshot, view, view.cached_tokens, view.kept_tokens)
    longest = (each for each in holders if each.worker_id in view.reaches)
    holder = next(longest, None)
    if holder is None or holder.near_tokens <= view.cached_tokens:
        return plain
    fetched = _read_fetched(snapshot, plain, holder)
    pays = fetched.first_token < plain.first_token
    return fetched if pays or snapshot.fetch is FetchPages.ALWAYS else plain


def _read(snapshot: Snapshot, view: PrefillView, cached: int, kept: int = 0) -> Reading:
    missing, costs = snapshot.prompt_tokens - cached, snapshot.costs
    compute = costs.prefill_seconds(missing, cached)
    all_of_it = costs.prefill_seconds(missing, cached, view.pending_tokens, kept)
    return Reading(view, cached, compute, all_of_it)


def _read_fetched(snapshot: Snapshot, plain: Reading, holder: DecodeView) -> Reading:
    size, costs = snapshot.page_size, snapshot.costs
    # What the prefill worker keeps in its second tier is fetched too, not brought back.
    tokens = holder.near_tokens - (plain.view.cached_tokens - plain.view.kept_tokens)
    rest = _read(snapshot, plain.view, holder.near_tokens)
    late = costs.fetch_seconds(tokens // size * snapshot.page_bytes) - costs.wait_seconds(
        plain.view.pending_tokens
    )
    always = snapshot.fetch is FetchPages.ALWAYS
    saved = ALWAYS_SECONDS if always else plain.first_token - rest.first_token
    return rest._replace(
        first_token=rest.first_token + max(late, 0.0),
        fetch=Fetch(holder.worker_id, holder.near_tokens // size, tokens, saved),
    )

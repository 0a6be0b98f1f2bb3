"""Which workers serve a request: a pure function of a snapshot.

Of the pairs that are connected and have room, the one with the least predicted
time (router/placement/scorer.py). Where reading the prompt on the decode worker itself is
predicted to take less, it is read there.
"""

from __future__ import annotations

from baton.core.errors import BatonError, Exhausted, LayoutMismatch, Unavailable
from baton.router.placement.placement import (
    DecodeView,
    LocalPrefill,
    Placement,
    Policy,
    Reason,
    Snapshot,
    Strategy,
)
from baton.router.placement.scorer import (
    Pair,
    answering,
    best_pair,
    local_forecast,
    ranked_local,
    ranked_prefill,
)


def choose(snapshot: Snapshot, *, one_token: bool = False) -> Placement | BatonError:
    """Where a request goes, or why it must wait.

    Exhausted: there are workers, but none with room. LayoutMismatch: waiting
    will not help. Any other Unavailable: workers are missing, and may come.
    """
    if snapshot.local is LocalPrefill.ALWAYS and snapshot.decode:
        return _local(snapshot, Reason.LOCAL_ONLY)
    placed = _prefill_only(snapshot) if one_token else _split(snapshot)
    # A pool that cannot push is an operator's mistake, to be seen and not hidden.
    missing = isinstance(placed, Unavailable) and not isinstance(placed, LayoutMismatch)
    if missing and snapshot.local_prefill and snapshot.decode:
        return _local(snapshot, Reason.NO_PREFILL, str(placed))
    return placed


def _prefill_only(snapshot: Snapshot) -> Placement | BatonError:
    if not snapshot.prefill:
        return _why_none(snapshot)
    free = [view for view in snapshot.prefill if view.has_room]
    if not free:
        return _full("prefill")
    chosen = ranked_prefill(snapshot, free)[0].view
    return Placement(
        chosen.view.worker_id,
        "",
        Policy.PREFILL,
        code=Reason.ONE_TOKEN,
        forecast=chosen.forecast(),
        fetch=chosen.fetch,
    )


def _split(snapshot: Snapshot) -> Placement | BatonError:
    names = {view.worker_id for view in snapshot.decode}
    connected = [view for view in snapshot.prefill if not names.isdisjoint(view.reaches)]
    if not connected:
        return _why_none(snapshot)
    prefill = [view for view in connected if view.has_room]
    decode = [view for view in snapshot.decode if view.has_room]
    answers = answering(snapshot, decode)
    pair = best_pair(snapshot, prefill, decode, answers)
    if pair is None:
        return _full("decode" if prefill else "prefill")
    if snapshot.strategy is Strategy.KV_AWARE and snapshot.local is LocalPrefill.AUTO:
        local = ranked_local(snapshot, decode, answers)[0]
        if local.cost < pair.cost:
            return _place_local(snapshot, local.view, Reason.LOCAL_FASTER)
    return Placement(
        pair.prefill.view.worker_id,
        pair.decode.worker_id,
        code=_split_reason(snapshot, pair),
        forecast=pair.prefill.forecast(),
        fetch=pair.prefill.fetch,
    )


def _local(snapshot: Snapshot, code: Reason, reason: str = "") -> Placement | BatonError:
    free = [view for view in snapshot.decode if view.has_room]
    if not free:
        return _full("decode")
    chosen = ranked_local(snapshot, free, answering(snapshot, free))[0].view
    return _place_local(snapshot, chosen, code, reason)


def _place_local(snapshot: Snapshot, view: DecodeView, code: Reason, reason: str = "") -> Placement:
    forecast = local_forecast(snapshot, view)
    return Placement("", view.worker_id, Policy.LOCAL, reason, code, forecast)


def _split_reason(snapshot: Snapshot, pair: Pair) -> Reason:
    if snapshot.strategy is not Strategy.KV_AWARE:
        return Reason(snapshot.strategy.value)
    if pair.prefill.fetch:
        return Reason.FETCHED
    if any(view.cached_tokens > pair.prefill.cached_tokens for view in snapshot.prefill):
        return Reason.CACHE_BUSY
    cached = pair.prefill.cached_tokens or pair.decode.cached_tokens
    return Reason.CACHED if cached else Reason.LEAST_TIME


def _full(role: str) -> Exhausted:
    return Exhausted(f"every {role} worker is full")


def _why_none(snapshot: Snapshot) -> Unavailable:
    if not snapshot.prefill:
        return Unavailable("no prefill worker is ready")
    if not snapshot.decode:
        return Unavailable("no decode worker is ready")
    if snapshot.mismatches:
        return LayoutMismatch(snapshot.mismatches[0])
    return Unavailable("no prefill worker is connected to a decode worker yet")

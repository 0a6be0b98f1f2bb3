"""Chooses the workers for a request: a pure function of a snapshot.

Chooses the connected pair with capacity that has the least predicted time
(router/placement/scorer.py), or a decode worker alone if local prefill is predicted to take less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.core.errors import BatonError, Exhausted, LayoutMismatch, Unavailable
from baton.core.types import Role
from baton.router.placement.placement import (
    LocalPrefill,
    Placement,
    Reason,
    Snapshot,
    Strategy,
)
from baton.router.placement.scorer import (
    DecodeScores,
    Pair,
    PrefillScores,
    best_pair,
    forecast_local,
    preferred,
    rows_with_room,
)


def choose(snapshot: Snapshot, *, one_token: bool = False) -> Placement | BatonError:
    """Returns a placement, or why the request must wait.

    Exhausted: all workers are full. LayoutMismatch: waiting will not help. Any other Unavailable:
    workers are missing, and may come.
    """
    if snapshot.local is LocalPrefill.ALWAYS and snapshot.decode.worker_ids:
        return _local(snapshot, Reason.LOCAL_ONLY)
    placed = _prefill_only(snapshot) if one_token else _split(snapshot)
    # Local prefill must not hide an operator's mistake, such as pools that do not fit.
    missing = isinstance(placed, Unavailable) and not isinstance(placed, LayoutMismatch)
    if missing and snapshot.local_prefill and snapshot.decode.worker_ids:
        return _local(snapshot, Reason.NO_PREFILL, str(placed))
    return placed


def _prefill_only(snapshot: Snapshot) -> Placement | BatonError:
    workers = snapshot.prefill
    if not workers.worker_ids:
        return none_ready("prefill worker is", snapshot.faults.get(Role.PREFILL, ()))
    free = rows_with_room(workers.has_room)
    if not free:
        return _full("prefill")
    scores = PrefillScores(snapshot)
    costs = scores.costs()
    row = min(preferred(snapshot, free, scores.cached_tokens), key=costs.__getitem__)
    return Placement(
        workers.worker_ids[row],
        "",
        code=Reason.ONE_TOKEN,
        forecast=scores.forecast(row),
        fetch=scores.fetches.get(row),
    )


def _split(snapshot: Snapshot) -> Placement | BatonError:
    workers, others = snapshot.prefill, snapshot.decode
    if not any(workers.reaches):
        ids = workers.worker_ids, others.worker_ids
        return why_no_pair(*ids, snapshot.mismatches, snapshot.faults)
    prefill_rows, decode_rows = rows_with_room(workers.has_room), rows_with_room(others.has_room)
    prefill, decode = PrefillScores(snapshot), DecodeScores(snapshot)
    pair = best_pair(snapshot, prefill, decode, prefill_rows, decode_rows)
    if pair is None:
        return _full("decode" if any(workers.reaches[row] for row in prefill_rows) else "prefill")
    if snapshot.strategy is Strategy.KV_AWARE and snapshot.local is LocalPrefill.AUTO:
        cost, row = decode.best_local(decode_rows)
        if cost < pair.cost:
            return _place_local(snapshot, row, Reason.LOCAL_FASTER)
    return Placement(
        workers.worker_ids[pair.prefill],
        others.worker_ids[pair.decode],
        code=_split_reason(snapshot, prefill, pair),
        forecast=prefill.forecast(pair.prefill),
        fetch=prefill.fetches.get(pair.prefill),
    )


def _local(snapshot: Snapshot, code: Reason, reason: str = "") -> Placement | BatonError:
    free = rows_with_room(snapshot.decode.has_room)
    if not free:
        return _full("decode")
    _, row = DecodeScores(snapshot).best_local(free)
    return _place_local(snapshot, row, code, reason)


def _place_local(snapshot: Snapshot, row: int, code: Reason, reason: str = "") -> Placement:
    name, forecast = snapshot.decode.worker_ids[row], forecast_local(snapshot, row)
    return Placement("", name, reason, code, forecast)


def _split_reason(snapshot: Snapshot, scores: PrefillScores, pair: Pair) -> Reason:
    if snapshot.strategy is not Strategy.KV_AWARE:
        return Reason[snapshot.strategy.name]
    if pair.prefill in scores.fetches:
        return Reason.FETCHED
    cached = scores.cached_tokens[pair.prefill]
    if scores.most_cached > cached:
        return Reason.CACHE_BUSY
    reused = cached or snapshot.decode.cached_tokens[pair.decode]
    return Reason.CACHED if reused else Reason.LEAST_TIME


def _full(role: str) -> Exhausted:
    return Exhausted(f"every {role} worker is full")


def why_no_pair(
    prefill: Sequence[str],
    decode: Sequence[str],
    mismatches: Sequence[str],
    faults: Mapping[Role, Sequence[str]],
) -> Unavailable:
    """Returns why none of these prefill workers can push to a decode worker."""
    for role, workers in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        if not workers:
            return none_ready(f"{role} worker is", faults.get(role, ()))
    if mismatches:
        return LayoutMismatch(mismatches[0])
    return Unavailable("no prefill worker is connected to a decode worker yet")


def none_ready(missing: str, faults: Sequence[str]) -> Unavailable:
    """Returns the error for a missing worker. `faults` names those that fail health checks."""
    return Unavailable(f"no {missing} ready" + (f": {', '.join(faults)}" if faults else ""))

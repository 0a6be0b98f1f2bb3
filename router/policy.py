"""Which workers serve a request: a pure function of a snapshot."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import BatonError, Exhausted, LayoutMismatch, Unavailable


class Suspicion(enum.Enum):
    """Whether a request may be what kills the workers that run it."""

    NONE = enum.auto()
    # It has lost a worker.
    SUSPECT = enum.auto()
    # It has lost several, each time among other suspects: it is to be the only one.
    ALONE = enum.auto()


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A prefill worker that can be used, as the router sees it."""

    worker_id: str
    # Prompt tokens that wait there: the worker's word, or what this router
    # sent and has not had back, whichever is more.
    pending_tokens: int
    # Decode workers that it can push to.
    reaches: frozenset[str]
    # Whether it may be sent this request.
    has_room: bool = True


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A decode worker that can be used, as the router sees it."""

    worker_id: str
    # Requests there, running or waiting.
    requests: int
    free_pages: int
    # Whether it may be sent this request before it has promised pages to those
    # it was sent.
    has_room: bool = True


@dataclass(frozen=True, slots=True)
class Snapshot:
    prefill: Sequence[PrefillView] = ()
    decode: Sequence[DecodeView] = ()
    # Why pairs of attached workers cannot exchange pages, where they cannot.
    mismatches: Sequence[str] = ()
    # Whether decode workers may read prompts themselves where no prefill worker can.
    local_prefill: bool = False


class Policy(enum.StrEnum):
    """How a request's work is divided. The values travel to clients."""

    SPLIT = "split"
    LOCAL = "local"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Placement:
    # Empty when the decode worker reads the prompt itself.
    prefill: str
    # Empty when token #1 is known to be the last.
    decode: str
    policy: Policy = Policy.SPLIT
    reason: str = "least loaded"


def choose(snapshot: Snapshot, *, one_token: bool = False) -> Placement | BatonError:
    """Where a request goes, or why it must wait.

    Exhausted: there are workers, but none with room. LayoutMismatch: waiting
    will not help. Any other Unavailable: workers are missing, and may come.
    """
    placed = _prefill_only(snapshot) if one_token else _split(snapshot)
    # A pool that cannot push is an operator's mistake, to be seen and not hidden.
    missing = isinstance(placed, Unavailable) and not isinstance(placed, LayoutMismatch)
    if missing and snapshot.local_prefill and snapshot.decode:
        return _local(snapshot, str(placed))
    return placed


def _split(snapshot: Snapshot) -> Placement | BatonError:
    """The prefill worker with the fewest tokens to read, the decode worker with the fewest
    requests among those it reaches (then the most free pages; then by name)."""
    pairs = [
        (prefill, decode)
        for prefill in snapshot.prefill
        for decode in snapshot.decode
        if decode.worker_id in prefill.reaches
    ]
    if not pairs:
        return _why_none(snapshot)
    free = [pair for pair in pairs if pair[0].has_room and pair[1].has_room]
    if not free:
        return _full("decode" if any(pair[0].has_room for pair in pairs) else "prefill")
    prefill, decode = min(
        free,
        key=lambda pair: (
            pair[0].pending_tokens,
            *_decode_order(pair[1]),
            pair[0].worker_id,
        ),
    )
    return Placement(prefill.worker_id, decode.worker_id)


def _prefill_only(snapshot: Snapshot) -> Placement | BatonError:
    if not snapshot.prefill:
        return _why_none(snapshot)
    free = [view for view in snapshot.prefill if view.has_room]
    if not free:
        return _full("prefill")
    chosen = min(free, key=lambda view: (view.pending_tokens, view.worker_id))
    return Placement(chosen.worker_id, "", Policy.PREFILL, "one token is wanted")


def _local(snapshot: Snapshot, reason: str) -> Placement | BatonError:
    free = [view for view in snapshot.decode if view.has_room]
    if not free:
        return _full("decode")
    return Placement("", min(free, key=_decode_order).worker_id, Policy.LOCAL, reason)


def _decode_order(view: DecodeView) -> tuple[int, int, str]:
    return view.requests, -view.free_pages, view.worker_id


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

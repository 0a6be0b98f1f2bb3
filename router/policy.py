"""Which pair of workers serves a request: a pure function of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import LayoutMismatch, Unavailable


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A prefill worker that can be used, as the router sees it."""

    worker_id: str
    # Prompt tokens that wait there: the worker's word, or what this router
    # sent and has not had back, whichever is more.
    pending_tokens: int
    # Decode workers that it can push to.
    reaches: frozenset[str]


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A decode worker that can be used, as the router sees it."""

    worker_id: str
    # Requests there, running or waiting.
    requests: int
    free_pages: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    prefill: Sequence[PrefillView] = ()
    decode: Sequence[DecodeView] = ()
    # Why pairs of attached workers cannot exchange pages, where they cannot.
    mismatches: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    prefill: str
    decode: str


def least_loaded(snapshot: Snapshot) -> Placement:
    """The prefill worker with the fewest tokens to read, the decode worker with the fewest
    requests among those it reaches (then the most free pages; then by name)."""
    usable = [
        (prefill, decode)
        for prefill in snapshot.prefill
        for decode in snapshot.decode
        if decode.worker_id in prefill.reaches
    ]
    if not usable:
        raise _why_none(snapshot)
    prefill, decode = min(
        usable,
        key=lambda pair: (
            pair[0].pending_tokens,
            pair[1].requests,
            -pair[1].free_pages,
            pair[0].worker_id,
            pair[1].worker_id,
        ),
    )
    return Placement(prefill.worker_id, decode.worker_id)


def _why_none(snapshot: Snapshot) -> Unavailable:
    if not snapshot.prefill:
        return Unavailable("no prefill worker is ready")
    if not snapshot.decode:
        return Unavailable("no decode worker is ready")
    if snapshot.mismatches:
        return LayoutMismatch(snapshot.mismatches[0])
    return Unavailable("no prefill worker is connected to a decode worker yet")

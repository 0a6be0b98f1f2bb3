"""Snapshots of clusters for the policy, with known costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from baton.router.placement.cost_model import Costs, PromptCosts
from baton.router.placement.placement import (
    Column,
    DecodeColumns,
    Placement,
    PrefillColumns,
    Snapshot,
)
from baton.router.placement.policy import choose

BOTH = frozenset({"d0", "d1"})

# A millisecond a token, ten a step, one for each request in it; 100 KB a millisecond.
COSTS = Costs(
    prefill=PromptCosts(0.0, 1e-3, 0.0, 1e-3, 1e-4),
    local=PromptCosts(0.0, 1e-3, 0.0, 1e-3, 1e-4),
    transfer=(0.0, 1e-8),
    exposed=(0.0, 1.0),
    fetch=(2e-2, 1e-8),
    step=(1e-2, 1e-3, 0.0, 0.0),
    interfered=0.0,
    answer_tokens=100.0,
)


class PrefillView(NamedTuple):
    """A prefill worker: a row of the columns."""

    worker_id: str
    pending_tokens: int
    reaches: frozenset[str]
    has_room: bool = True
    cached_tokens: int = 0
    saved_tokens: int = 0
    lacks_adapter: bool = False


class DecodeView(NamedTuple):
    """A decode worker: a row of the columns."""

    worker_id: str
    requests: int
    free_pages: int
    has_room: bool = True
    cached_tokens: int = 0
    running: int = 0
    waiting: int = 0
    leased_pages: int = 0
    pending_tokens: int = 0
    saved_tokens: int = 0
    prefilling: int = 0
    lacks_adapter: bool = False


def cluster(
    prefill: Sequence[PrefillView] = (),
    decode: Sequence[DecodeView] = (),
    column: Callable[[Sequence[int]], Column] = list,
    **more: Any,
) -> Snapshot:
    """The cluster of these workers; `column` makes a column of its values."""

    def columns(views: Sequence[NamedTuple], names: Sequence[str]) -> dict[str, Any]:
        texts = "worker_id", "reaches"
        found = {name: [getattr(view, name) for view in views] for name in names}
        return {
            name.replace("worker_id", "worker_ids"): values if name in texts else column(values)
            for name, values in found.items()
        }

    names = frozenset(view.worker_id for view in decode)
    prefill = [view._replace(reaches=view.reaches & names) for view in prefill]
    return Snapshot(
        PrefillColumns(**columns(prefill, PrefillView._fields)),
        DecodeColumns(**columns(decode, DecodeView._fields)),
        **more,
    )


def prefill(
    name: str,
    pending: int = 0,
    reaches: frozenset[str] = BOTH,
    room: bool = True,
    cached: int = 0,
) -> PrefillView:
    return PrefillView(name, pending, reaches, room, cached)


def decode(
    name: str,
    requests: int = 0,
    free: int = 1000,
    room: bool = True,
    cached: int = 0,
    waiting: int = 0,
    pending: int = 0,
) -> DecodeView:
    running = requests - waiting
    return DecodeView(name, requests, free, room, cached, running, waiting, 0, pending)


def placed(snapshot: Snapshot) -> Placement:
    found = choose(snapshot)
    assert isinstance(found, Placement), found
    return found


def where(snapshot: Snapshot) -> tuple[str, str]:
    found = placed(snapshot)
    return found.prefill, found.decode


def asked(snapshot: Snapshot, tokens: int, **more: object) -> Snapshot:
    """For a prompt of so many tokens, in a cluster whose costs are known."""
    known = dataclasses.replace(
        snapshot, prompt_tokens=tokens, tokens_wanted=100, costs=COSTS, page_bytes=160_000
    )
    return dataclasses.replace(known, **more)  # type: ignore[arg-type]

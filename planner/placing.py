"""Where a simulated request goes: the router's own policy, or the same choice made faster.

`choose_exactly` asks router.policy. That takes a millisecond with a hundred workers, so from
`MANY` workers on `choose_quickly` ranks them instead: the same sums of
router/placement/scorer.py and cost_model.py in the same order, on columns. Both find the same pair
(tests/unit/test_simulated_placing.py).

Prompts are never read by decode workers here, nor are pages fetched from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from baton.core.errors import BatonError
from baton.planner.simulated_workers import Column, DecodePool, PrefillPool
from baton.router.placement.cost_model import Costs
from baton.router.placement.placement import (
    DecodeView,
    FetchPages,
    LocalPrefill,
    PrefillView,
    Snapshot,
)
from baton.router.placement.policy import choose

MANY = 12

Seconds = NDArray[numpy.float64]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and what the workers are like for it. Columns have a row an active worker."""

    prompt_tokens: int
    tokens_wanted: int
    prefill_cached: Column
    decode_cached: Column
    turn: int
    costs: Costs
    page_size: int
    page_bytes: int
    pool_pages: int
    # Requests that may wait on a decode worker.
    backlog: int


def choose_pair(ask: Ask, prefill: PrefillPool, decode: DecodePool) -> tuple[int, int] | None:
    """The two workers' indices, the second -1 where one token is wanted; None when the request
    must wait."""
    few = len(prefill.active) + len(decode.active) < MANY
    return (choose_exactly if few else choose_quickly)(ask, prefill, decode)


def choose_exactly(ask: Ask, prefill: PrefillPool, decode: DecodePool) -> tuple[int, int] | None:
    names = frozenset(str(index) for index in decode.active)
    snapshot = Snapshot(
        prefill=[
            PrefillView(str(index), int(prefill.pending[index]), names, True, cached)
            for index, cached in zip(prefill.active, ask.prefill_cached.tolist(), strict=True)
        ],
        decode=[
            _decode_view(ask, decode, index, cached)
            for index, cached in zip(decode.active, ask.decode_cached.tolist(), strict=True)
        ],
        local=LocalPrefill.NEVER,
        fetch=FetchPages.NEVER,
        costs=ask.costs,
        turn=ask.turn,
        prompt_tokens=ask.prompt_tokens,
        tokens_wanted=ask.tokens_wanted,
        page_size=ask.page_size,
        page_bytes=ask.page_bytes,
    )
    found = choose(snapshot, one_token=ask.tokens_wanted == 1)
    if isinstance(found, BatonError):
        return None
    return int(found.prefill), int(found.decode or -1)


def _decode_view(ask: Ask, decode: DecodePool, index: int, cached: int) -> DecodeView:
    leased = int(decode.leased[index])
    return DecodeView(
        worker_id=str(index),
        requests=int(decode.requests[index]),
        free_pages=ask.pool_pages - leased,
        has_room=bool(decode.waiting[index] < ask.backlog),
        cached_tokens=cached,
        running=int(decode.running[index]),
        waiting=int(decode.waiting[index]),
        leased_pages=leased,
    )


def choose_quickly(ask: Ask, prefill: PrefillPool, decode: DecodePool) -> tuple[int, int] | None:
    if not len(prefill.active) or not len(decode.active):
        return None
    compute = _compute(ask, ask.prefill_cached)
    ahead = _prefill_costs(ask, prefill, decode, compute)
    if ask.tokens_wanted == 1:
        return int(prefill.active[_first(ahead, ask.prefill_cached, ask.turn)]), -1
    rows = numpy.flatnonzero(decode.waiting[decode.active] < ask.backlog)
    if not len(rows):
        return None
    hiding = float(compute.max())
    cached = ask.decode_cached[rows]
    indices = decode.active[rows]
    behind = _decode_costs(ask, decode, indices, cached) + _late(ask, cached, hiding)
    row, column = _best_pair(ask, (ahead, compute), (behind, cached), hiding)
    return int(prefill.active[row]), int(indices[column])


def _best_pair(
    ask: Ask, prefill: tuple[Seconds, Seconds], decode: tuple[Seconds, Column], hiding: float
) -> tuple[int, int]:
    """As router.score.best_pair: both sides ranked, and left off where no better can come. Mostly
    that is after the first of each side, for which nothing has to be ranked.

    Each side has its costs, and the seconds of compute or cached tokens.
    """
    ahead, compute = prefill
    behind, cached = decode
    row = _first(ahead, ask.prefill_cached, ask.turn)
    column = _first(behind, cached, ask.turn)
    best = _pair_cost(ask, ahead[row] + behind[column], int(cached[column]), compute[row], hiding)
    others = (ahead + behind[column] < best).sum() + (ahead[row] + behind < best).sum()
    itself = 2 * bool(ahead[row] + behind[column] < best)
    if others == itself:
        return row, column
    first = _ranked(ahead, ask.prefill_cached, ask.turn)
    second = _ranked(behind, cached, ask.turn)
    return _best_ranked(ask, (ahead, first, compute), (behind, second, cached), hiding)


def _best_ranked(
    ask: Ask,
    prefill: tuple[Seconds, Column, Seconds],
    decode: tuple[Seconds, Column, Column],
    hiding: float,
) -> tuple[int, int]:
    """The same, with the order of the rows of each side."""
    ahead, first, compute = prefill
    behind, second, cached = decode
    best, pair = numpy.inf, (-1, -1)
    for row in first:
        if ahead[row] + behind[second[0]] >= best:
            break
        for column in second:
            bound = ahead[row] + behind[column]
            if bound >= best:
                break
            cost = _pair_cost(ask, bound, int(cached[column]), compute[row], hiding)
            if cost < best:
                best, pair = cost, (int(row), int(column))
    return pair


def _pair_cost(ask: Ask, bound: float, held: int, compute: float, hiding: float) -> float:
    """`bound` is what both sides cost where `hiding` seconds hide the transfer."""
    own = _late_pages(ask, held, float(compute))
    return bound + (own - _late_pages(ask, held, hiding))


def _first(costs: Seconds, cached: Column, turn: int) -> int:
    """Which one `_ranked` has first."""
    rows = numpy.flatnonzero(costs == costs.min())
    if len(rows) > 1:
        held = cached[rows]
        rows = rows[held == held.max()]
    return int(rows[rows.searchsorted(turn % len(costs)) % len(rows)])


def _ranked(costs: Seconds, cached: Column, turn: int) -> Column:
    """The order of router.score: the cheapest; of equal ones, who has the most cached; then
    another one each turn."""
    start = turn % len(costs)
    order = numpy.arange(len(costs))
    rows = numpy.concatenate((order[start:], order[:start]))
    return rows[numpy.lexsort((-cached[rows], costs[rows]))]


def _compute(ask: Ask, cached: Column) -> Seconds:
    once, each, look, _, _ = ask.costs.prefill
    missing = ask.prompt_tokens - cached
    seconds: Seconds = once + missing * (each + look * (cached + missing / 2))
    return seconds


def _prefill_costs(ask: Ask, prefill: PrefillPool, decode: DecodePool, compute: Seconds) -> Seconds:
    wait: Seconds = compute + ask.costs.prefill[3] * prefill.pending[prefill.active]
    if not ask.costs.disturbed:
        return wait
    running = int(decode.running[decode.active].sum())
    disturbed: Seconds = compute * (running * ask.costs.disturbed)
    return wait + disturbed


def _decode_costs(ask: Ask, decode: DecodePool, indices: Column, cached: Column) -> Seconds:
    costs = ask.costs
    once, request, page, _ = costs.step
    own = -(-ask.prompt_tokens // ask.page_size)
    requests, leased = decode.requests[indices], decode.leased[indices]
    short = own > ask.pool_pages - leased + cached // ask.page_size
    one_answer = costs.answer_tokens * (once + request * requests + page * leased)
    room = (decode.waiting[indices] + short) * one_answer / numpy.maximum(requests, 1)
    step = once + request * (requests + 1) + page * (leased + own)
    added = requests * (request + page * own)
    steps: Seconds = room + min(ask.tokens_wanted, costs.answer_tokens) * (step + added)
    return steps


def _late(ask: Ask, cached: Column, hiding: float) -> Seconds:
    """What decode waits for its last page behind so many seconds of compute. Few lengths are
    cached anywhere."""
    if (cached == cached[0]).all():
        return numpy.full(len(cached), _late_pages(ask, int(cached[0]), hiding))
    known = {int(held): _late_pages(ask, int(held), hiding) for held in numpy.unique(cached)}
    return numpy.array([known[held] for held in cached.tolist()])


def _late_pages(ask: Ask, cached: int, compute_seconds: float) -> float:
    pages = -(-(ask.prompt_tokens - cached) // ask.page_size)
    return ask.costs.exposed_seconds(pages * ask.page_bytes, compute_seconds)

"""Scores workers, and pairs of them, by predicted time.

A pair costs the wait and the compute of what the prefill worker lacks, the transfer of what the
decode worker lacks, the answer's steps there, and what all this adds to the time of other
requests (router/placement/cost_model.py). So a session stays where its cache is for as long as
that saves more than the queue there costs.

The other strategies, least loaded and round robin, know nothing of caches.

Formulas take numbers or arrays, so that many workers are scored at once. The planner's simulator
uses the same scorer. A row is a worker's place in the snapshot's columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import add
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from baton.router.placement.cost_model import larger
from baton.router.placement.placement import (
    Column,
    FetchPages,
    FetchPlan,
    Forecast,
    LocalPrefill,
    Snapshot,
    Strategy,
)

ALWAYS_SECONDS = 60.0
"""How long a prompt may wait for pages that are fetched whatever they save."""

Scores = list[float] | NDArray[numpy.float64]
"""Seconds for each row: an array where columns are."""


class Pair(NamedTuple):
    cost: float
    # Rows.
    prefill: int
    decode: int


@dataclass(slots=True)
class PrefillEstimate:
    """How soon each prefill worker would have the first token, by row."""

    # Tokens of the prompt that need not be computed, and the seconds of the others.
    cached_tokens: list[int]
    compute: Scores
    # From now on.
    first_token: Scores
    # Where fetching takes less than computing.
    fetches: dict[int, FetchPlan]

    def forecast(self, snapshot: Snapshot, row: int) -> Forecast:
        pending = int(snapshot.prefill.pending_tokens[row])
        return Forecast(float(self.first_token[row]), pending, self.cached_tokens[row])


def rows_with_room(has_room: Column) -> list[int]:
    if isinstance(has_room, numpy.ndarray):
        return numpy.flatnonzero(has_room).tolist()
    return [row for row, room in enumerate(has_room) if room]


def estimate_prefill(snapshot: Snapshot) -> PrefillEstimate:
    workers, costs, tokens = snapshot.prefill, snapshot.costs, snapshot.prompt_tokens

    def compute(cached: int) -> float:
        return costs.prefill.seconds(tokens - cached, cached)

    def first_token(own: float, pending: int, saved: int) -> float:
        return own + costs.prefill.wait(pending, saved)

    seconds = _evaluate(compute, workers.cached_tokens)
    first = _evaluate(first_token, seconds, workers.pending_tokens, workers.saved_tokens)
    estimate = PrefillEstimate(_listed(workers.cached_tokens), seconds, first, {})
    if holders := _holders(snapshot):
        _consider_fetches(snapshot, estimate, holders)
    return estimate


def score_answers(snapshot: Snapshot) -> Scores:
    """By decode row: the wait for room, and the answer's steps beside the others."""
    costs, size, workers = snapshot.costs, snapshot.page_size, snapshot.decode
    own, wanted = -(-snapshot.prompt_tokens // size), snapshot.tokens_wanted

    def answer(requests: int, leased: int, waiting: int, free: int, cached: int) -> float:
        short = own > free + cached // size
        room = costs.room_seconds(waiting + short, requests, leased)
        return room + costs.decode_seconds(wanted, requests, leased, own)

    return _evaluate(
        answer,
        workers.requests,
        workers.leased_pages,
        workers.waiting,
        workers.free_pages,
        workers.cached_tokens,
    )


def best_prefill(snapshot: Snapshot, estimate: PrefillEstimate, rows: list[int]) -> int:
    """The prefill worker for a request that needs no decode worker."""
    costs = _prefill_costs(snapshot, estimate, rows)
    return _rank(snapshot, rows, costs, estimate.cached_tokens)[0]


def best_pair(
    snapshot: Snapshot,
    estimate: PrefillEstimate,
    answers: Scores,
    prefill_rows: list[int],
    decode_rows: list[int],
) -> Pair | None:
    """The cheapest connected pair of these rows. Most pairs are never scored: none costs less than
    its two workers do, and those are ranked."""
    if not prefill_rows or not decode_rows:
        return None
    names, reaches = snapshot.decode.worker_ids, snapshot.prefill.reaches
    # Pages travel behind the compute: of all pairs' transfers this hides the most.
    hiding = float(max([estimate.compute[row] for row in prefill_rows]))
    ahead = _prefill_costs(snapshot, estimate, prefill_rows)
    behind = _decode_costs(snapshot, answers, hiding, decode_rows)
    ranked = _rank(snapshot, decode_rows, behind, _listed(snapshot.decode.cached_tokens))
    best: Pair | None = None
    for row in _rank(snapshot, prefill_rows, ahead, estimate.cached_tokens):
        if best is not None and ahead[row] + behind[ranked[0]] >= best.cost:
            break
        for column in ranked:
            bound = ahead[row] + behind[column]
            if best is not None and bound >= best.cost:
                break
            if names[column] not in reaches[row]:
                continue
            cost = bound + _more_late(snapshot, column, float(estimate.compute[row]), hiding)
            if best is None or cost < best.cost:
                best = Pair(cost, row, column)
    return best


def best_local(snapshot: Snapshot, answers: Scores, rows: list[int]) -> tuple[float, int]:
    """The cost and the row of the best decode worker for local prefill, during which its other
    requests stand still.

    Scored as if no prefill worker were busy. Where both pools share hardware, what a prompt on a
    prefill worker costs prompts here is charged to that prompt (`Costs.interference`). Otherwise
    a few prompts there, which have priority, would make local prefill look slow and draw all
    others after them.
    """
    costs, tokens, workers = snapshot.costs, snapshot.prompt_tokens, snapshot.decode

    def local(
        answer: float, cached: int, pending: int, running: int, saved: int, leased: int
    ) -> float:
        first = costs.local.seconds(tokens - cached, cached, pending, saved)
        prefill = costs.local.seconds(tokens - cached, cached)
        # Each running request still gets one token meanwhile. Prompts in prefill came before.
        still = running * larger(prefill - costs.step_seconds(running, leased), 0.0)
        return first + still + answer

    if snapshot.strategy is Strategy.KV_AWARE:
        scores = _listed(
            _evaluate(
                local,
                answers,
                workers.cached_tokens,
                workers.pending_tokens,
                workers.running,
                workers.saved_tokens,
                workers.leased_pages,
            )
        )
    else:
        scores = _load_costs(snapshot, rows)
    row = _rank(snapshot, rows, scores, _listed(workers.cached_tokens))[0]
    return scores[row], row


def forecast_local(snapshot: Snapshot, row: int) -> Forecast:
    cached, pending, saved = (int(column[row]) for column in _local_columns(snapshot))
    return Forecast(_local_formula(snapshot)(cached, pending, saved), pending, cached)


def earliest_first_token(snapshot: Snapshot) -> float:
    """Seconds to the first token on the fastest worker, whether or not that has room."""
    seconds = _listed(estimate_prefill(snapshot).first_token)
    if snapshot.local is not LocalPrefill.NEVER:
        seconds += _listed(_evaluate(_local_formula(snapshot), *_local_columns(snapshot)))
    return min(seconds, default=0.0)


def _evaluate(formula: Callable[..., float], *columns: Column | Scores) -> Scores:
    """The formula for each row; for all at once where columns are arrays."""
    if not isinstance(columns[0], numpy.ndarray):
        return list(map(formula, *columns))
    scores: Any = formula(*columns)
    return scores  # type: ignore[no-any-return]


def _listed(column: Any) -> list[Any]:
    return column.tolist() if isinstance(column, numpy.ndarray) else list(column)


def _rank(snapshot: Snapshot, rows: list[int], costs: list[float], cached: list[int]) -> list[int]:
    """The cheapest first; of equal ones, the one with most cached; then another one each turn."""
    ranked = _turned(snapshot, rows)
    if snapshot.strategy is Strategy.KV_AWARE:
        ranked.sort(key=cached.__getitem__, reverse=True)
    ranked.sort(key=costs.__getitem__)
    return ranked


def _turned(snapshot: Snapshot, rows: list[int]) -> list[int]:
    start = snapshot.turn % len(rows)
    return rows[start:] + rows[:start]


def _places(snapshot: Snapshot, rows: list[int], count: int) -> list[float]:
    """Round robin."""
    places = [0.0] * count
    for place, row in enumerate(_turned(snapshot, rows)):
        places[row] = float(place)
    return places


def _load_costs(snapshot: Snapshot, rows: list[int]) -> list[float]:
    """Decode workers for the other strategies. Least loaded: the fewest requests; of those, the
    most free pages."""
    workers = snapshot.decode
    if snapshot.strategy is Strategy.ROUND_ROBIN:
        return _places(snapshot, rows, len(workers.worker_ids))
    loads = zip(_listed(workers.requests), _listed(workers.free_pages), strict=True)
    return [requests + 1.0 / (free + 2) for requests, free in loads]


def _prefill_costs(snapshot: Snapshot, estimate: PrefillEstimate, rows: list[int]) -> list[float]:
    if snapshot.strategy is Strategy.ROUND_ROBIN:
        return _places(snapshot, rows, len(estimate.compute))
    if snapshot.strategy is Strategy.LEAST_LOADED:
        return [float(tokens) for tokens in _listed(snapshot.prefill.pending_tokens)]
    share = snapshot.costs.interference(*_requests_beside(snapshot))
    costs = _evaluate(
        lambda first, own: first + own * share, estimate.first_token, estimate.compute
    )
    return _listed(costs)


def _decode_costs(
    snapshot: Snapshot, answers: Scores, hiding: float, rows: list[int]
) -> list[float]:
    if snapshot.strategy is not Strategy.KV_AWARE:
        return _load_costs(snapshot, rows)
    workers = snapshot.decode
    columns = workers.cached_tokens, workers.saved_tokens, workers.pending_tokens
    return _listed(_evaluate(add, answers, _evaluate(_late_formula(snapshot, hiding), *columns)))


def _requests_beside(snapshot: Snapshot) -> tuple[int, int]:
    """Requests on decode workers that only decode, and on those that prefill too."""
    workers = snapshot.decode
    if not any(_listed(workers.pending_tokens)):
        return sum(_listed(workers.running)), 0
    columns = map(_listed, (workers.running, workers.pending_tokens, workers.prefilling))
    decoding = prefilling = 0
    for running, pending, own in zip(*columns, strict=True):
        if pending:
            prefilling += running + max(own, 1)
        else:
            decoding += running
    return decoding, prefilling


def _local_columns(snapshot: Snapshot) -> tuple[Column, Column, Column]:
    workers = snapshot.decode
    return workers.cached_tokens, workers.pending_tokens, workers.saved_tokens


def _local_formula(snapshot: Snapshot) -> Callable[[int, int, int], float]:
    """Seconds to the first token by local prefill, beside the prefill workers that are busy."""
    costs, tokens = snapshot.costs.local, snapshot.prompt_tokens
    busy_prefill = sum(pending > 0 for pending in _listed(snapshot.prefill.pending_tokens))

    def seconds(cached: int, pending: int, saved: int) -> float:
        return costs.seconds(tokens - cached, cached, pending, saved, busy_prefill)

    return seconds


def _late_formula(snapshot: Snapshot, compute: float) -> Callable[[int, int, int], float]:
    """How long a decode worker waits for its last page once the prompt is computed, or for
    prompts in local prefill. Pages of its second tier are restored meanwhile."""
    costs, size = snapshot.costs, snapshot.page_size
    tokens, page_bytes = snapshot.prompt_tokens, snapshot.page_bytes

    def late(cached: int, saved: int, pending: int) -> float:
        pages = -(-(tokens - cached) // size)
        pushed = costs.exposed_seconds(pages * page_bytes, compute)
        restored = larger(costs.local.wait(0, saved) - compute, 0.0)
        return larger(pushed + restored, costs.local.wait(pending) - compute)

    return late


def _more_late(snapshot: Snapshot, row: int, compute: float, hiding: float) -> float:
    """How much longer a decode worker waits where less compute hides the transfer."""
    if snapshot.strategy is not Strategy.KV_AWARE:
        return 0.0
    workers = snapshot.decode
    columns = workers.cached_tokens, workers.saved_tokens, workers.pending_tokens
    values = [int(column[row]) for column in columns]
    return _late_formula(snapshot, compute)(*values) - _late_formula(snapshot, hiding)(*values)


def _holders(snapshot: Snapshot) -> list[tuple[int, str]]:
    """Decode workers to fetch from, with the tokens in their pools, the most first."""
    if snapshot.fetch is FetchPages.NEVER or snapshot.strategy is not Strategy.KV_AWARE:
        return []
    workers = snapshot.decode
    columns = _listed(workers.cached_tokens), _listed(workers.saved_tokens), workers.worker_ids
    held = [(cached - saved, name) for cached, saved, name in zip(*columns, strict=True)]
    return sorted((each for each in held if each[0]), key=lambda each: -each[0])


def _consider_fetches(
    snapshot: Snapshot, estimate: PrefillEstimate, holders: list[tuple[int, str]]
) -> None:
    """Where a decode worker holds more of the prompt than the prefill worker does, as after an
    answer of its own, the prefill worker fetches those pages if that takes less than to compute
    them. The fetch runs beside the compute of earlier prompts, so only the rest is waited for."""
    for row, reaches in enumerate(snapshot.prefill.reaches):
        near, holder = next((each for each in holders if each[1] in reaches), (0, ""))
        if near > estimate.cached_tokens[row]:
            _consider_fetch(snapshot, estimate, row, near, holder)


def _consider_fetch(
    snapshot: Snapshot, estimate: PrefillEstimate, row: int, near: int, holder: str
) -> None:
    size, costs, workers = snapshot.page_size, snapshot.costs, snapshot.prefill
    # What the prefill worker has in its second tier is fetched too, not restored.
    tokens = near - (estimate.cached_tokens[row] - int(workers.saved_tokens[row]))
    compute = costs.prefill.seconds(snapshot.prompt_tokens - near, near)
    wait = costs.prefill.wait(int(workers.pending_tokens[row]))
    late = costs.fetch_seconds(tokens // size * snapshot.page_bytes) - wait
    first_token = compute + wait + larger(late, 0.0)
    always, plain = snapshot.fetch is FetchPages.ALWAYS, float(estimate.first_token[row])
    if first_token >= plain and not always:
        return
    seconds = ALWAYS_SECONDS if always else plain - (compute + wait)
    estimate.fetches[row] = FetchPlan(holder, near // size, tokens, seconds)
    estimate.cached_tokens[row] = near
    estimate.compute[row], estimate.first_token[row] = compute, first_token

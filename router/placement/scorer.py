"""Scores workers, and pairs of them, by predicted time.

A pair costs the wait and the compute for what the prefill worker lacks, the transfer of what the
decode worker lacks, the answer's steps there, and the time that all this adds to other requests
(router/placement/cost_model.py). So a session stays where its cache is as long as that saves more
than the queue there costs.

The other strategies, least loaded and round robin, ignore caches.

Formulas take numbers or arrays, so that many workers are scored at once; scores are lists. The
planner's simulator uses the same scorer. A row is a worker's index in the snapshot's columns.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add
from typing import Any, NamedTuple

import numpy

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

ADAPTER_SECONDS = 0.4
"""Seconds to load an adapter: measured with one of 84 MB, from files in the page cache."""

ALWAYS_SECONDS = 60.0
"""How long a prompt may wait for fetched pages with FetchPages.ALWAYS."""


class Pair(NamedTuple):
    cost: float
    prefill: int  # row
    decode: int  # row


class PrefillScores:
    """Predicts the first token's time on each prefill worker, by row."""

    def __init__(self, snapshot: Snapshot) -> None:
        workers, costs, tokens = snapshot.prefill, snapshot.costs.prefill, snapshot.prompt_tokens
        self._snapshot = snapshot
        # Prompt tokens that need not be computed, and the seconds to compute the others.
        self.cached_tokens = _listed(workers.cached_tokens)
        self.most_cached = max(self.cached_tokens, default=0)  # without fetches
        compute = _evaluate(
            lambda cached: costs.seconds(tokens - cached, cached), workers.cached_tokens
        )
        self.compute = _listed(compute)
        wait = _evaluate(costs.wait, workers.pending_tokens, workers.saved_tokens)
        if len(workers.lacks_adapter):  # It loads while earlier prompts are computed.
            wait = _evaluate(_with_load, wait, workers.lacks_adapter)
        self.first_token = _listed(_evaluate(add, compute, wait))
        # By row, if fetching is predicted to take less time than computing.
        self.fetches: dict[int, FetchPlan] = {}
        if snapshot.fetch is not FetchPages.NEVER and snapshot.strategy is Strategy.KV_AWARE:
            self._consider_fetches()

    def forecast(self, row: int) -> Forecast:
        pending = int(self._snapshot.prefill.pending_tokens[row])
        return Forecast(self.first_token[row], pending, self.cached_tokens[row])

    def costs(self) -> list[float]:
        """Returns first-token times plus what the prompt's compute costs requests on decode
        workers."""
        snapshot = self._snapshot
        if snapshot.strategy is Strategy.ROUND_ROBIN:
            return [0.0] * len(self.compute)
        if snapshot.strategy is Strategy.LEAST_LOADED:
            return _listed(snapshot.prefill.pending_tokens)
        share = snapshot.costs.interference(*_count_decode_requests(snapshot))
        return [
            first + own * share for first, own in zip(self.first_token, self.compute, strict=True)
        ]

    def _consider_fetches(self) -> None:
        """Plans fetches from decode workers that hold more of the prompt, for example after an
        answer, if that takes less time than computing. A fetch overlaps with the compute of
        earlier prompts, so only the rest adds to the wait."""
        workers = self._snapshot.decode
        columns = _listed(workers.cached_tokens), _listed(workers.saved_tokens), workers.worker_ids
        held = [(cached - saved, name) for cached, saved, name in zip(*columns, strict=True)]
        holders = sorted((each for each in held if each[0]), key=lambda each: -each[0])
        if not holders:
            return
        for row, reaches in enumerate(self._snapshot.prefill.reaches):
            near, holder = next((each for each in holders if each[1] in reaches), (0, ""))
            if near > self.cached_tokens[row]:
                self._consider_fetch(row, near, holder)

    def _consider_fetch(self, row: int, near: int, holder: str) -> None:
        snapshot, costs, workers = self._snapshot, self._snapshot.costs, self._snapshot.prefill
        # Pages in the prefill worker's second tier are fetched too, not restored.
        tokens = near - (self.cached_tokens[row] - int(workers.saved_tokens[row]))
        pages, held_pages = snapshot.pages_after(near, near - tokens), near // snapshot.page_size
        compute = costs.prefill.seconds(snapshot.prompt_tokens - near, near)
        wait = costs.prefill.wait(int(workers.pending_tokens[row]))
        if len(workers.lacks_adapter):
            wait = _with_load(wait, int(workers.lacks_adapter[row]))
        late = costs.fetch_seconds(pages * snapshot.page_bytes) - wait
        first_token = compute + wait + larger(late, 0.0)
        seconds = self.first_token[row] - (compute + wait)
        if snapshot.fetch is FetchPages.ALWAYS:
            seconds = ALWAYS_SECONDS
        elif first_token >= self.first_token[row]:
            return
        self.fetches[row] = FetchPlan(holder, held_pages, tokens, seconds)
        self.cached_tokens[row] = near
        self.compute[row], self.first_token[row] = compute, first_token


class DecodeScores:
    """Predicts an answer's cost on each decode worker, by row."""

    def __init__(self, snapshot: Snapshot) -> None:
        costs, workers, prompt = snapshot.costs, snapshot.decode, snapshot.prompt_tokens
        own, wanted = snapshot.pages_after(prompt, 0), snapshot.tokens_wanted

        def answer(requests: int, leased: int, waiting: int, free: int, cached: int) -> float:
            short = snapshot.pages_after(prompt, cached) > free
            room = costs.room_seconds(waiting + short, requests, leased)
            return room + costs.decode_seconds(wanted, requests, leased, own)

        def transfer(cached: int) -> float:
            return costs.transfer_seconds(
                snapshot.pages_after(prompt, cached) * snapshot.page_bytes
            )

        columns = workers.requests, workers.leased_pages, workers.waiting, workers.free_pages
        self._snapshot = snapshot
        self._aware = snapshot.strategy is Strategy.KV_AWARE
        # The wait for pages and a place in the batch, and the answer's steps among the others.
        if self._aware:
            self._answers = _evaluate(answer, *columns, workers.cached_tokens)
        else:
            self._answers = _load_costs(snapshot)
        self.answers = _listed(self._answers)
        self._transfers = _evaluate(transfer, workers.cached_tokens)

    def costs(self, compute: float) -> list[float]:
        """Returns the costs of answers whose transfer hides behind `compute` seconds. They include
        the wait, after the prompt's compute, for the last page or for prompts in local prefill.
        Pages of the second tier are restored meanwhile."""
        if not self._aware:
            return self.answers
        workers, costs = self._snapshot.decode, self._snapshot.costs
        local = costs.local

        def cost(answer: float, transfer: float, saved: int, pending: int) -> float:
            pushed = costs.exposed_seconds(transfer, compute)
            restored = larger(local.restored * saved - compute, 0.0)
            return answer + larger(pushed + restored, local.queued * pending - compute)

        columns = workers.saved_tokens, workers.pending_tokens
        found = _evaluate(cost, self._answers, self._transfers, *columns)
        if len(workers.lacks_adapter):  # It loads while the prompt is computed.
            found = _evaluate(
                lambda known, lacks: known + larger(ADAPTER_SECONDS * lacks - compute, 0.0),
                found,
                workers.lacks_adapter,
            )
        return _listed(found)

    def best_local(self, rows: list[int]) -> tuple[float, int]:
        """Returns the cost and the row of the best decode worker for local prefill, during which
        its other requests wait.

        Scored as if no prefill worker were busy. If both pools share hardware, a prompt on a
        prefill worker is charged with what it costs prompts here (`Costs.interference`). Otherwise
        a few prompts there, which have priority, would make local prefill look slow and attract
        all others.
        """
        snapshot, workers = self._snapshot, self._snapshot.decode
        costs, tokens = snapshot.costs, snapshot.prompt_tokens

        def local(
            answer: float, cached: int, pending: int, running: int, saved: int, leased: int
        ) -> float:
            first = costs.local.seconds(tokens - cached, cached, pending, saved)
            prefill = costs.local.seconds(tokens - cached, cached)
            # Each running request still gets one token meanwhile. Earlier prompts are in `first`.
            still = running * larger(prefill - costs.step_seconds(running, leased), 0.0)
            return first + still + answer

        scores = self.answers
        if self._aware:
            columns = workers.cached_tokens, workers.pending_tokens, workers.running
            more = workers.saved_tokens, workers.leased_pages
            found = _evaluate(local, self._answers, *columns, *more)
            if len(workers.lacks_adapter):
                found = _evaluate(_after_load, found, workers.lacks_adapter)
            scores = _listed(found)
        row = min(preferred(snapshot, rows, workers.cached_tokens), key=scores.__getitem__)
        return scores[row], row


def _with_load(wait: Any, lacks: Any) -> Any:
    """Returns the wait for earlier prompts and for an adapter that loads meanwhile."""
    return larger(wait, ADAPTER_SECONDS * lacks)


def _after_load(seconds: Any, lacks: Any) -> Any:
    return seconds + ADAPTER_SECONDS * lacks


def _load_costs(snapshot: Snapshot) -> list[float]:
    """Returns costs of answers for the other strategies. Least loaded prefers the fewest requests,
    then the most free pages."""
    workers = snapshot.decode
    if snapshot.strategy is not Strategy.LEAST_LOADED:
        return [0.0] * len(workers.worker_ids)
    loads = zip(_listed(workers.requests), _listed(workers.free_pages), strict=True)
    return [requests + 1.0 / (free + 2) for requests, free in loads]


def best_pair(
    snapshot: Snapshot,
    prefill: PrefillScores,
    decode: DecodeScores,
    prefill_rows: list[int],
    decode_rows: list[int],
) -> Pair | None:
    """Returns the cheapest connected pair of these rows. Skips most pairs: after a prefill worker
    that reaches all decode workers, only one with longer compute, which hides more of the
    transfer, can do better, and none whose own cost exceeds that of the best pair."""
    if not prefill_rows or not decode_rows:
        return None
    names, reaches, ahead = snapshot.decode.worker_ids, snapshot.prefill.reaches, prefill.costs()
    columns = preferred(snapshot, decode_rows, snapshot.decode.cached_tokens)
    least = min([decode.answers[column] for column in columns])
    best: Pair | None = None
    hidden = -1.0
    rows = preferred(snapshot, prefill_rows, prefill.cached_tokens)
    for row in sorted(rows, key=ahead.__getitem__):
        if best is not None and ahead[row] + least >= best.cost:
            break
        compute, reached = prefill.compute[row], columns
        if compute <= hidden:
            continue
        if len(reaches[row]) < len(names):
            reached = [column for column in columns if names[column] in reaches[row]]
        else:
            hidden = compute
        if reached:
            behind = decode.costs(compute)
            column = min(reached, key=behind.__getitem__)
            cost = ahead[row] + behind[column]
            if best is None or cost < best.cost:
                best = Pair(cost, row, column)
    return best


def preferred(snapshot: Snapshot, rows: list[int], cached: Column) -> list[int]:
    """Orders rows for ties: most cached first, then another one each turn."""
    start = snapshot.turn % len(rows)
    turned = rows[start:] + rows[:start]
    if snapshot.strategy is Strategy.KV_AWARE:
        turned.sort(key=_listed(cached).__getitem__, reverse=True)
    return turned


def rows_with_room(has_room: Column) -> list[int]:
    if isinstance(has_room, numpy.ndarray):
        return numpy.flatnonzero(has_room).tolist()
    return [row for row, room in enumerate(has_room) if room]


def forecast_local(snapshot: Snapshot, row: int) -> Forecast:
    cached, pending, saved = (int(column[row]) for column in _local_columns(snapshot))
    return Forecast(_local_first_token(snapshot)(cached, pending, saved), pending, cached)


class PredictedSeconds(NamedTuple):
    waiting: float  # for other requests
    own: float

    @property
    def total(self) -> float:
        return self.waiting + self.own


def earliest_answer(snapshot: Snapshot) -> PredictedSeconds:
    """Predicts the time to the last token on the fastest workers, full or not."""
    first, rest = earliest_first_token(snapshot), _shortest_decode(snapshot)
    return PredictedSeconds(first.waiting + rest.waiting, first.own + rest.own)


def _shortest_decode(snapshot: Snapshot) -> PredictedSeconds:
    """Predicts the time from the first token to the last: the wait for pages and a place in the
    batch, and the answer's own steps."""
    costs, workers = snapshot.costs, snapshot.decode
    tokens = min(snapshot.tokens_wanted - 1, costs.answer_tokens)
    if not costs.knows_answers or tokens <= 0:
        return PredictedSeconds(0.0, 0.0)

    def room(running: int, leased: int, waiting: int) -> float:
        return costs.room_seconds(waiting, running, leased)

    def steps(running: int, leased: int) -> float:
        return tokens * costs.step_seconds(running, leased)

    rooms = _evaluate(room, workers.running, workers.leased_pages, workers.waiting)
    return _soonest(rooms, _evaluate(steps, workers.running, workers.leased_pages))


def earliest_first_token(snapshot: Snapshot) -> PredictedSeconds:
    """Predicts the time to the first token on the fastest worker, full or not."""
    scores = PrefillScores(snapshot)
    firsts, computes = scores.first_token, scores.compute
    if snapshot.local is not LocalPrefill.NEVER:
        cached, pending, saved = _local_columns(snapshot)
        local = _local_first_token(snapshot)
        firsts += _listed(_evaluate(local, cached, pending, saved))
        computes += _listed(_evaluate(lambda tokens: local(tokens, 0, 0), cached))
    waits = [max(first - own, 0.0) for first, own in zip(firsts, computes, strict=True)]
    return _soonest(waits, computes)


def _soonest(waiting: Column, own: Column) -> PredictedSeconds:
    rows = map(PredictedSeconds, _listed(waiting), _listed(own))
    return min(rows, key=lambda row: row.total, default=PredictedSeconds(0.0, 0.0))


def _local_columns(snapshot: Snapshot) -> tuple[Column, Column, Column]:
    workers = snapshot.decode
    return workers.cached_tokens, workers.pending_tokens, workers.saved_tokens


def _local_first_token(snapshot: Snapshot) -> Callable[[int, int, int], float]:
    """Returns a formula for the first token's seconds by local prefill, while the current prefill
    workers are busy."""
    costs, tokens = snapshot.costs.local, snapshot.prompt_tokens
    busy_prefill = sum(pending > 0 for pending in _listed(snapshot.prefill.pending_tokens))

    def seconds(cached: int, pending: int, saved: int) -> float:
        return costs.seconds(tokens - cached, cached, pending, saved, busy_prefill)

    return seconds


def _count_decode_requests(snapshot: Snapshot) -> tuple[int, int]:
    """Counts requests on decode workers that only decode, and on those that also prefill."""
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


def _evaluate(formula: Callable[..., Any], *columns: Column) -> Any:
    """Applies the formula to each row; to all at once if columns are arrays."""
    if isinstance(columns[0], numpy.ndarray):
        return formula(*columns)
    return list(map(formula, *columns))


def _listed(column: Column) -> list[Any]:
    return column.tolist() if isinstance(column, numpy.ndarray) else list(column)

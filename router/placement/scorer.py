"""Workers and pairs of them by predicted time.

Every pair is scored by what is predicted (router/placement/cost_model.py): the wait and
the compute of what the prefill worker lacks the transfer of
what the decode worker lacks, the answer's steps there, and what all this adds to the time of
other requests. A session so stays where its cache is for as long as that saves
more than the queue there costs.

The other strategies, least loaded and round robin, know nothing of caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from baton.router.placement.placement import (
    DecodeView,
    FetchPages,
    FetchPlan,
    Forecast,
    LocalPrefill,
    PrefillView,
    Snapshot,
    Strategy,
)

ALWAYS_SECONDS = 60.0
"""How long a prompt may wait for pages that are to be fetched whatever they save."""


class PrefillEstimate(NamedTuple):
    view: PrefillView
    # Of the prompt, what need not be computed.
    cached_tokens: int
    # How long the rest takes to compute, and how long it is from now to token #1.
    compute: float
    first_token: float
    fetch: FetchPlan | None = None

    def forecast(self) -> Forecast:
        return Forecast(self.first_token, self.view.pending_tokens, 0, self.cached_tokens)


def prefill_estimates(snapshot: Snapshot, views: Sequence[PrefillView]) -> list[PrefillEstimate]:
    holders = _holders(snapshot)
    return [_best(snapshot, view, holders) for view in views]


def _holders(snapshot: Snapshot) -> list[DecodeView]:
    """Workers that can be fetched from, those with the longest part of the prompt first."""
    if snapshot.fetch is FetchPages.NEVER or snapshot.strategy is not Strategy.KV_AWARE:
        return []
    holders = [view for view in snapshot.decode if view.near_tokens]
    return sorted(holders, key=lambda view: -view.near_tokens)


def _best(snapshot: Snapshot, view: PrefillView, holders: Sequence[DecodeView]) -> PrefillEstimate:
    plain = _read(snapshot, view)
    holder = next((each for each in holders if each.worker_id in view.reaches), None)
    if holder is None or holder.near_tokens <= view.cached_tokens:
        return plain
    return _read_fetched(snapshot, plain, holder) or plain


def _read(snapshot: Snapshot, view: PrefillView) -> PrefillEstimate:
    cached, costs = view.cached_tokens, snapshot.costs
    compute = costs.prefill_seconds(snapshot.prompt_tokens - cached, cached)
    before = costs.wait_seconds(view.pending_tokens, view.kept_tokens)
    return PrefillEstimate(view, cached, compute, compute + before)


def _read_fetched(
    snapshot: Snapshot, plain: PrefillEstimate, holder: DecodeView
) -> PrefillEstimate | None:
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
    fetch = FetchPlan(holder.worker_id, near // size, tokens, saved)
    return PrefillEstimate(view, near, compute, first_token, fetch)


View = TypeVar("View", bound=PrefillEstimate | DecodeView)


class Ranked(NamedTuple, Generic[View]):
    cost: float
    view: View


class Pair(NamedTuple):
    cost: float
    prefill: PrefillEstimate
    decode: DecodeView


def answering(snapshot: Snapshot, views: Sequence[DecodeView]) -> dict[str, float]:
    """By worker: the wait for room, and the answer's steps beside the others."""
    return {view.worker_id: _answer_cost(snapshot, view) for view in views}


def best_pair(
    snapshot: Snapshot,
    prefill: Sequence[PrefillView],
    decode: Sequence[DecodeView],
    answers: Mapping[str, float],
) -> Pair | None:
    """The cheapest pair that is connected. Most pairs are never looked at: none costs less than
    its two workers do, and those are ranked."""
    best: Pair | None = None
    reading = ranked_prefill(snapshot, prefill)
    # Pages travel behind the compute: of all pairs' transfers this hides the most.
    hiding = max((first.compute for _, first in reading), default=0.0)
    ranked = ranked_decode(snapshot, decode, answers, hiding)
    for ahead, first in reading:
        for behind, second in ranked:
            if best is not None and ahead + behind >= best.cost:
                break
            if second.worker_id not in first.view.reaches:
                continue
            late = _late_pages(snapshot, second, first.compute)
            more = late - _late_pages(snapshot, second, hiding)
            if best is None or ahead + behind + more < best.cost:
                best = Pair(ahead + behind + more, first, second)
    return best


def ranked_prefill(
    snapshot: Snapshot, views: Sequence[PrefillView]
) -> list[Ranked[PrefillEstimate]]:
    def cost(reading: PrefillEstimate) -> float:
        if snapshot.strategy is Strategy.LEAST_LOADED:
            return float(reading.view.pending_tokens)
        return reading.first_token + snapshot.costs.disturbance(reading.compute, *beside)

    beside = _beside(snapshot.decode)
    return _ranked(snapshot, prefill_estimates(snapshot, views), cost)


def ranked_decode(
    snapshot: Snapshot, views: Sequence[DecodeView], answers: Mapping[str, float], hiding: float
) -> list[Ranked[DecodeView]]:
    """For prompts whose pages travel behind so many seconds of compute."""

    def cost(view: DecodeView) -> float:
        if snapshot.strategy is Strategy.LEAST_LOADED:
            return _least_loaded(view)
        return answers[view.worker_id] + _late_pages(snapshot, view, hiding)

    return _ranked(snapshot, views, cost)


def ranked_local(
    snapshot: Snapshot, views: Sequence[DecodeView], answers: Mapping[str, float]
) -> list[Ranked[DecodeView]]:
    """With the prompt read there, while all that is decoded there stands still.

    As if no prefill worker were at work: where both share hardware, what a prompt there costs
    the prompts here counts against the one that is sent there (`Costs.disturbance`). Else few
    prompts there, which go first, would make this look slow, and draw all others after them.
    """

    def cost(view: DecodeView) -> float:
        if snapshot.strategy is Strategy.LEAST_LOADED:
            return _least_loaded(view)
        first_token = _local_first_token(snapshot, view)
        return first_token + _standstill(snapshot, view) + answers[view.worker_id]

    return _ranked(snapshot, views, cost)


def local_forecast(snapshot: Snapshot, view: DecodeView) -> Forecast:
    seconds = _local_first_token(snapshot, view, snapshot.busy_prefill)
    return Forecast(seconds, view.pending_tokens, view.running, view.cached_tokens)


def earliest_first_token(snapshot: Snapshot) -> float:
    """Seconds to token #1 on the worker where it comes first, whether or not that has room."""
    local = () if snapshot.local is LocalPrefill.NEVER else snapshot.decode
    seconds = [reading.first_token for reading in prefill_estimates(snapshot, snapshot.prefill)]
    busy = snapshot.busy_prefill
    seconds += [_local_first_token(snapshot, view, busy) for view in local]
    return min(seconds, default=0.0)


def _ranked(
    snapshot: Snapshot, views: Sequence[View], cost: Callable[[View], float]
) -> list[Ranked[View]]:
    """The cheapest first; of equal ones, who has the most cached; then another one each turn."""
    start = snapshot.turn % len(views) if views else 0
    turned = [*views[start:], *views[:start]]
    if snapshot.strategy is Strategy.ROUND_ROBIN:
        return [Ranked(float(place), view) for place, view in enumerate(turned)]
    aware = snapshot.strategy is Strategy.KV_AWARE
    ranked = (Ranked(cost(view), view) for view in turned)
    return sorted(ranked, key=lambda each: (each.cost, -aware * each.view.cached_tokens))


def _least_loaded(view: DecodeView) -> float:
    """The fewest requests; of those, the most free pages."""
    return view.requests + 1.0 / (view.free_pages + 2)


def _beside(views: Sequence[DecodeView]) -> tuple[int, int]:
    """Requests on decode workers that only decode, and on those that read prompts too."""
    running = sum(view.running for view in views if not view.pending_tokens)
    reading = sum(view.running + max(view.reading, 1) for view in views if view.pending_tokens)
    return running, reading


def _local_first_token(snapshot: Snapshot, view: DecodeView, busy_prefill: int = 0) -> float:
    missing = snapshot.prompt_tokens - view.cached_tokens
    return snapshot.costs.local_seconds(
        missing,
        view.cached_tokens,
        view.pending_tokens,
        view.running,
        view.kept_tokens,
        busy_prefill,
    )


def _standstill(snapshot: Snapshot, view: DecodeView) -> float:
    """What reading the prompt there adds to the time of all that is decoded there: they wait,
    but for the token that each of them writes meanwhile. Who is being read there came before."""
    costs = snapshot.costs
    missing = snapshot.prompt_tokens - view.cached_tokens
    reading = costs.local_seconds(missing, view.cached_tokens, running=view.running)
    step = costs.step_seconds(view.running, view.leased_pages)
    return view.running * max(0.0, reading - step)


def _answer_cost(snapshot: Snapshot, view: DecodeView) -> float:
    costs = snapshot.costs
    own = -(-snapshot.prompt_tokens // snapshot.page_size)
    short = own > view.free_pages + view.cached_tokens // snapshot.page_size
    room = costs.room_seconds(view.waiting + short, view.requests, view.leased_pages)
    steps = costs.decode_seconds(snapshot.tokens_wanted, view.requests, view.leased_pages, own)
    return room + steps


def _late_pages(snapshot: Snapshot, view: DecodeView, compute_seconds: float) -> float:
    """How long decode waits for its last page once the prompt is computed, or for prompts that
    it reads itself. Pages that it keeps come back meanwhile."""
    if snapshot.strategy is not Strategy.KV_AWARE:
        return 0.0
    pages = -(-(snapshot.prompt_tokens - view.cached_tokens) // snapshot.page_size)
    back = snapshot.costs.restore_seconds(view.kept_tokens) - compute_seconds
    late = snapshot.costs.exposed_seconds(pages * snapshot.page_bytes, compute_seconds)
    busy = snapshot.costs.local_wait_seconds(view.pending_tokens) - compute_seconds
    return max(late + max(0.0, back), busy)

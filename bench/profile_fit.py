"""Fits a profile for the simulator to the timings of live requests.

Timings include the time of each push, and when each chunk of a prompt was computed; prompts that
were computed in one step share its time by their tokens. The time of a single decode step is not
reported: an answer gives the mean of its steps, with the average numbers of requests and of busy
prefill workers meanwhile. If workers share cores, a second counts by the share of it that the
decode worker had (planner/profile.py), so that the profile gives the cost of a step with its own
core.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from baton.core.online_fit import OnlineFit
from baton.core.page_reach import pages_held, windows_of
from baton.planner.profile import Profile, SharedCores
from baton.router.placement.cost_model import (
    BUSY_SHARE,
    EXPOSED_PRIOR,
    PREFILL_PRIOR,
    STEP_PRIOR,
    TRANSFER_PRIOR,
)
from baton.v1 import timing_pb2 as pb

MEMORY = 256.0

PROMPT_PRIOR = (*PREFILL_PRIOR[:3], BUSY_SHARE * PREFILL_PRIOR[1])
"""Coefficients of a prompt, a token, a pair of a token and one that it attends to, and a pair of a
token and another busy worker."""

Samples = list[tuple[tuple[float, ...], float]]


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The workers' configuration."""

    page_size: int
    page_bytes: int
    prefill_pages: int
    decode_pages: int
    max_batch: int
    chunk_tokens: int
    cores: SharedCores
    windows: tuple[int, ...] = ()  # as in Profile


@dataclass(frozen=True, slots=True)
class Span:
    """A time span of one answer on a worker, on the router's clock."""

    worker: str
    began: float
    ended: float
    pages: float = 0.0
    tokens: int = 1

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def covers(self, moment: float) -> bool:
        return self.began < moment < self.ended

    def cut(self, others: Iterable[Span]) -> Iterator[tuple[float, float]]:
        """Cuts the span at other spans' starts and ends. Yields each part's middle and seconds."""
        edges = {edge for each in others for edge in (each.began, each.ended)}
        inside = sorted({self.began, self.ended, *filter(self.covers, edges)})
        for began, ended in itertools.pairwise(inside):
            yield (began + ended) / 2, ended - began


def fit_profile(
    timings: Sequence[pb.RequestTiming], ttfts: Sequence[float], shape: PoolShape
) -> Profile:
    """Fits a profile. `ttfts` are measured by the clients."""
    answers = [timing.answers[0] for timing in timings]
    computed_chunks = [_chunks(each, shape) for each in timings]
    spans = [chunk for chunks in computed_chunks for chunk in chunks]
    busy = merged(spans)
    prompts = [
        (
            _prompt(answer, busy_beside(chunks, busy)),
            sum(own_seconds(chunk, spans) for chunk in chunks),
        )
        for answer, chunks in zip(answers, computed_chunks, strict=True)
        if chunks
    ]
    prefill, crowding = _fit_prompts(prompts)
    pushes = [each for each in answers if each.transferred_bytes]
    known = (pb.PHASE_KIND_QUEUE, pb.PHASE_KIND_PREFILL_WAIT, pb.PHASE_KIND_PREFILL)
    explained = sum(_seconds(each, kind) for each in answers for kind in known)
    return Profile(
        prefill=prefill,
        transfer=_fit(TRANSFER_PRIOR, [_push(each) for each in pushes]),
        exposed=(*_fit(EXPOSED_PRIOR[:1], [_exposed(each) for each in pushes]), 1.0),
        step=_fit(STEP_PRIOR, list(_steps(timings, busy, shape))),
        overhead_seconds=max(0.0, (sum(ttfts) - explained) / len(answers)),
        page_size=shape.page_size,
        windows=shape.windows,
        page_bytes=shape.page_bytes,
        prefill_pages=shape.prefill_pages,
        decode_pages=shape.decode_pages,
        max_batch=shape.max_batch,
        chunk_tokens=shape.chunk_tokens,
        shared_cores=shape.cores.count,
        decode_weight=shape.cores.decode_weight,
        crowding=crowding,
    )


def _fit_prompts(prompts: Samples) -> tuple[tuple[float, ...], float]:
    """Fits a profile's coefficients of prompts, and its crowding."""
    *own, beside = _fit(PROMPT_PRIOR, prompts)
    tokens = sum(features[1] for features, _ in prompts)
    took = sum(seconds for _, seconds in prompts)
    alone = took - beside * sum(features[3] for features, _ in prompts)
    return (*own, took / tokens), beside * tokens / alone


def _fit(prior: Sequence[float], samples: Samples) -> tuple[float, ...]:
    """Fits coefficients, scaled so that all samples together take their measured time."""
    fit = OnlineFit(prior, MEMORY)
    for features, seconds in samples:
        fit.note(features, seconds)
    predicted = sum(fit.predict(features) for features, _ in samples)
    pace = sum(seconds for _, seconds in samples) / predicted if predicted else 1.0
    return tuple(pace * each for each in fit.coefficients)


def _prompt(answer: pb.AnswerTiming, beside: float) -> tuple[float, ...]:
    """`beside` is the number of other busy prefill workers."""
    missing = answer.prompt_tokens - answer.cached_tokens
    looks = missing * (answer.cached_tokens + missing / 2)
    return 1.0, float(missing), looks, missing * beside


def _push(answer: pb.AnswerTiming) -> tuple[tuple[float, ...], float]:
    seconds = _seconds(answer, pb.PHASE_KIND_TRANSFER) + _seconds(
        answer, pb.PHASE_KIND_TRANSFER, hidden=True
    )
    return (1.0, float(answer.transferred_bytes)), seconds


def _exposed(answer: pb.AnswerTiming) -> tuple[tuple[float, ...], float]:
    """The time from token #1 to the first step: the rest of the transfer, and admission."""
    kinds = (pb.PHASE_KIND_RESERVE, pb.PHASE_KIND_TRANSFER, pb.PHASE_KIND_ADMIT)
    return (1.0,), sum(_seconds(answer, kind) for kind in kinds)


def own_seconds(span: Span, spans: Sequence[Span]) -> float:
    """The span's own seconds: overlapping spans on the same worker share the time."""
    there = [each for each in spans if each.worker == span.worker]
    return sum(
        seconds * span.tokens / sum(each.tokens for each in there if each.covers(middle))
        for middle, seconds in span.cut(there)
    )


def busy_beside(chunks: Sequence[Span], busy: Sequence[Span]) -> float:
    """Average number of other busy workers during these spans."""
    others = [each for each in busy if each.worker != chunks[0].worker]
    parts = [part for chunk in chunks for part in chunk.cut(others)]
    common = sum(seconds * sum(each.covers(middle) for each in others) for middle, seconds in parts)
    return common / sum(seconds for _, seconds in parts)


def merged(spans: Sequence[Span]) -> list[Span]:
    """The busy spans of each worker: overlapping spans are merged."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.worker, each.began)):
        last = found[-1] if found else None
        if last and last.worker == span.worker and span.began <= last.ended:
            found[-1] = Span(last.worker, last.began, max(last.ended, span.ended))
        else:
            found.append(span)
    return found


def _steps(
    timings: Sequence[pb.RequestTiming], prefills: Sequence[Span], shape: PoolShape
) -> Iterable[tuple[tuple[float, ...], float]]:
    """Samples of decode steps. `prefills` are the busy spans of prefill workers."""
    found = [_span(each, pb.PHASE_KIND_DECODE, shape) for each in timings]
    decodes = [each for each in found if each]
    for timing, own in zip(timings, found, strict=True):
        steps = timing.answers[0].completion_tokens - 2
        if own and steps >= 1 and own.seconds > 0:
            features, seconds = computed(own, decodes, prefills, shape.cores)
            yield features, seconds / steps


def computed(
    own: Span, decodes: Sequence[Span], prefills: Sequence[Span], cores: SharedCores
) -> tuple[tuple[float, ...], float]:
    """The mean features of an answer's steps, and the seconds in which its worker had a core."""
    total = 0.0
    sums: tuple[float, ...] = (0.0, 0.0, 0.0)
    for middle, seconds in own.cut([*decodes, *prefills]):
        now = [each for each in decodes if each.covers(middle)]
        here = [each for each in now if each.worker == own.worker]
        busy = sum(each.covers(middle) for each in prefills)
        seconds *= cores.decode_speed(busy, len({each.worker for each in now}))
        features = len(here), sum(each.pages for each in here), busy
        sums = tuple(a + seconds * b for a, b in zip(sums, features, strict=True))
        total += seconds
    return (1.0, *(each / total for each in sums)), total


def _chunks(timing: pb.RequestTiming, shape: PoolShape) -> list[Span]:
    """The chunks of a prompt."""
    whole = _span(timing, pb.PHASE_KIND_PREFILL, shape)
    if not whole:
        return []
    found, began = [], whole.began
    for chunk in timing.answers[0].chunks:
        if chunk.seconds <= 0:
            continue
        found.append(Span(whole.worker, began, began + chunk.seconds, tokens=chunk.tokens))
        began += chunk.seconds
    return found


def _span(timing: pb.RequestTiming, kind: pb.PhaseKind.ValueType, shape: PoolShape) -> Span | None:
    """All phases of a kind, as one span."""
    answer = timing.answers[0]
    phases = [each for each in answer.phases if each.kind == kind and not each.hidden]
    if not phases:
        return None
    began = timing.arrived_at + phases[0].start_seconds
    ended = timing.arrived_at + phases[-1].start_seconds + phases[-1].seconds
    tokens = answer.prompt_tokens + answer.completion_tokens / 2
    pages = pages_held(tokens, shape.page_size, windows_of(shape.windows))
    return Span(phases[0].worker or answer.decode_worker, began, ended, pages)


def _seconds(
    answer: pb.AnswerTiming, kind: pb.PhaseKind.ValueType, *, hidden: bool = False
) -> float:
    return sum(
        each.seconds for each in answer.phases if each.kind == kind and each.hidden == hidden
    )

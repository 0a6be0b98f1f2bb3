"""From the timings of live requests to what a worker costs: a profile for the simulator.

What each push took is told, and from when to when each prompt was computed; prompts of one
worker that overlap share its time. A step's time is not told by itself: each
answer has the mean of its steps, beside the requests and the busy prefill workers that there
were meanwhile on average.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.v1 import timing_pb2 as pb
from planner.profile import Profile
from router.cost_model import EXPOSED_PRIOR, PREFILL_PRIOR, STEP_PRIOR, TRANSFER_PRIOR
from router.online_fit import OnlineFit

MEMORY = 256.0

Samples = list[tuple[tuple[float, ...], float]]


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What the workers were configured with."""

    page_size: int
    page_bytes: int
    prefill_pages: int
    decode_pages: int
    max_batch: int


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one answer's life on a worker, in seconds of the router's clock."""

    worker: str
    began: float
    ended: float
    pages: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def overlap(self, other: Span) -> float:
        """The share of this stretch during which the other one lasted too."""
        common = min(self.ended, other.ended) - max(self.began, other.began)
        return max(0.0, common) / self.seconds


def fit_profile(
    timings: Sequence[pb.RequestTiming], ttfts: Sequence[float], shape: PoolShape
) -> Profile:
    """`ttfts` are the clients' own."""
    answers = [timing.answers[0] for timing in timings]
    reading = [_span(each, pb.PHASE_KIND_PREFILL, shape.page_size) for each in timings]
    spans = [each for each in reading if each]
    prompts = [
        (_prompt(answer), own_seconds(span, spans))
        for answer, span in zip(answers, reading, strict=True)
        if span
    ]
    once, each_token, look = _fit(PREFILL_PRIOR[:3], prompts)
    pushes = [each for each in answers if each.transferred_bytes]
    computed = sum(features[1] for features, _ in prompts)
    known = (pb.PHASE_KIND_QUEUE, pb.PHASE_KIND_PREFILL_WAIT, pb.PHASE_KIND_PREFILL)
    told = sum(_seconds(each, kind) for each in answers for kind in known)
    return Profile(
        prefill=(once, each_token, look, sum(seconds for _, seconds in prompts) / computed),
        transfer=_fit(TRANSFER_PRIOR, [_push(each) for each in pushes]),
        exposed=(*_fit(EXPOSED_PRIOR[:1], [_exposed(each) for each in pushes]), 1.0),
        step=_fit(STEP_PRIOR, list(_steps(timings, merged(spans), shape.page_size))),
        overhead_seconds=max(0.0, (sum(ttfts) - told) / len(answers)),
        page_size=shape.page_size,
        page_bytes=shape.page_bytes,
        prefill_pages=shape.prefill_pages,
        decode_pages=shape.decode_pages,
        max_batch=shape.max_batch,
    )


def _fit(prior: Sequence[float], samples: Samples) -> tuple[float, ...]:
    """The coefficients, at a pace at which all samples together take what they took."""
    fit = OnlineFit(prior, MEMORY)
    for features, seconds in samples:
        fit.note(features, seconds)
    predicted = sum(fit.predict(features) for features, _ in samples)
    pace = sum(seconds for _, seconds in samples) / predicted if predicted else 1.0
    return tuple(pace * each for each in fit.coefficients)


def _prompt(answer: pb.AnswerTiming) -> tuple[float, ...]:
    missing = answer.prompt_tokens - answer.cached_tokens
    return 1.0, float(missing), missing * (answer.cached_tokens + missing / 2)


def _push(answer: pb.AnswerTiming) -> tuple[tuple[float, ...], float]:
    seconds = _seconds(answer, pb.PHASE_KIND_TRANSFER) + _seconds(
        answer, pb.PHASE_KIND_TRANSFER, hidden=True
    )
    return (1.0, float(answer.transferred_bytes)), seconds


def _exposed(answer: pb.AnswerTiming) -> tuple[tuple[float, ...], float]:
    """From token #1 to the first step: the rest of the transfer, and what comes with it."""
    kinds = (pb.PHASE_KIND_RESERVE, pb.PHASE_KIND_TRANSFER, pb.PHASE_KIND_ADMIT)
    return (1.0,), sum(_seconds(answer, kind) for kind in kinds)


def own_seconds(span: Span, spans: Sequence[Span]) -> float:
    """What of a stretch was its own: where others overlap on the same worker, all share."""
    others = [each for each in spans if each.worker == span.worker]
    edges = {edge for each in others for edge in (each.began, each.ended)}
    inside = sorted(edge for edge in edges if span.began <= edge <= span.ended)
    own = 0.0
    for began, ended in itertools.pairwise(inside):
        middle = (began + ended) / 2
        own += (ended - began) / sum(each.began < middle < each.ended for each in others)
    return own


def merged(spans: Sequence[Span]) -> list[Span]:
    """When each worker was busy, overlapping stretches as one."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.worker, each.began)):
        last = found[-1] if found else None
        if last and last.worker == span.worker and span.began <= last.ended:
            found[-1] = Span(last.worker, last.began, max(last.ended, span.ended))
        else:
            found.append(span)
    return found


def _steps(
    timings: Sequence[pb.RequestTiming], reading: Sequence[Span], page_size: int
) -> Iterable[tuple[tuple[float, ...], float]]:
    """`reading` is when prefill workers were busy."""
    writing = [_span(each, pb.PHASE_KIND_DECODE, page_size) for each in timings]
    for timing, own in zip(timings, writing, strict=True):
        steps = timing.answers[0].completion_tokens - 2
        if own is None or steps < 1 or own.seconds <= 0:
            continue
        beside = [(own.overlap(each), each) for each in writing if each and each is not own]
        here = [(share, each) for share, each in beside if each.worker == own.worker]
        requests = 1.0 + sum(share for share, _ in here)
        pages = own.pages + sum(share * each.pages for share, each in here)
        busy = sum(own.overlap(each) for each in reading)
        yield (1.0, requests, pages, busy), own.seconds / steps


def _span(timing: pb.RequestTiming, kind: pb.PhaseKind.ValueType, page_size: int) -> Span | None:
    """All phases of a kind, as one stretch."""
    answer = timing.answers[0]
    phases = [each for each in answer.phases if each.kind == kind and not each.hidden]
    if not phases:
        return None
    began = timing.arrived_at + phases[0].start_seconds
    ended = timing.arrived_at + phases[-1].start_seconds + phases[-1].seconds
    pages = (answer.prompt_tokens + answer.completion_tokens / 2) / page_size
    return Span(phases[0].worker or answer.decode_worker, began, ended, pages)


def _seconds(
    answer: pb.AnswerTiming, kind: pb.PhaseKind.ValueType, *, hidden: bool = False
) -> float:
    return sum(
        each.seconds for each in answer.phases if each.kind == kind and each.hidden == hidden
    )

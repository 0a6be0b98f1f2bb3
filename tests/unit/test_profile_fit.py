from __future__ import annotations

import random

import pytest

from baton.planner.profile import SharedCores, weight
from baton.v1 import timing_pb2 as pb
from bench.profile_fit import (
    PoolShape,
    Span,
    busy_beside,
    computed,
    fit_profile,
    merged,
    own_seconds,
)

SHAPE = PoolShape(
    page_size=16,
    page_bytes=1000,
    prefill_pages=64,
    decode_pages=32,
    max_batch=8,
    chunk_tokens=512,
    cores=SharedCores(2, weight(19)),
)


def timing(source: random.Random, at: float) -> pb.RequestTiming:
    """Of a request alone in a cluster that takes a millisecond a token, a step of ten
    milliseconds, and 5 ms of overhead."""
    tokens, answer = source.randint(50, 900), source.randint(5, 60)
    compute, decode = 1e-3 * tokens, 1e-2 * (answer - 2)
    phases = [
        (pb.PHASE_KIND_QUEUE, 0.0, 0.2, False),
        (pb.PHASE_KIND_PREFILL, 0.2, compute, False),
        (pb.PHASE_KIND_TRANSFER, 0.2, 1e-6 * tokens, True),
        (pb.PHASE_KIND_TRANSFER, 0.205 + compute, 2e-3, False),
        (pb.PHASE_KIND_DECODE, 0.3 + compute, decode, False),
    ]
    return pb.RequestTiming(
        arrived_at=at,
        answers=[
            pb.AnswerTiming(
                decode_worker="decode-0",
                prompt_tokens=tokens,
                completion_tokens=answer,
                transferred_bytes=64 * tokens,
                chunks=[pb.Chunk(tokens=tokens, seconds=compute)],
                phases=[
                    pb.Phase(kind=kind, start_seconds=start, seconds=seconds, hidden=hidden)
                    for kind, start, seconds, hidden in phases
                ],
            )
        ],
    )


def test_a_profile_says_again_what_the_timings_say() -> None:
    source = random.Random(2)
    timings = [timing(source, 100.0 * index) for index in range(60)]
    ttfts = [0.205 + 1e-3 * each.answers[0].prompt_tokens for each in timings]
    profile = fit_profile(timings, ttfts, SHAPE)
    costs = profile.costs(10.0)
    assert costs.prefill.seconds(500, 0) == pytest.approx(0.5, rel=0.1)
    assert costs.step_seconds(1, 30) == pytest.approx(0.01, rel=0.1)
    assert costs.exposed_seconds(0.0, 1.0) == pytest.approx(2e-3, rel=0.1)
    assert profile.overhead_seconds == pytest.approx(0.005, rel=0.01)
    assert (profile.decode_pages, profile.max_batch, profile.shared_cores) == (32, 8, 2)


def test_prompts_of_one_step_share_its_time_by_their_tokens() -> None:
    spans = [Span("p0", 0.0, 4.0, tokens=3), Span("p0", 0.0, 4.0), Span("p1", 0.0, 9.0)]
    assert [own_seconds(each, spans) for each in spans] == [3.0, 1.0, 9.0]


def test_a_worker_is_busy_from_its_first_prompt_to_its_last() -> None:
    spans = [Span("p0", 0.0, 4.0), Span("p0", 2.0, 6.0), Span("p1", 0.0, 9.0)]
    assert merged(spans) == [Span("p0", 0.0, 6.0), Span("p1", 0.0, 9.0)]


def test_workers_are_beside_each_other_while_both_are_busy() -> None:
    busy = [Span("p0", 0.0, 4.0), Span("p1", 3.0, 9.0), Span("p2", 0.0, 4.0)]
    assert busy_beside([Span("p0", 0.0, 2.0), Span("p0", 2.0, 4.0)], busy) == 1.25


def test_time_in_which_a_decode_worker_had_no_core_is_not_its_steps() -> None:
    own = Span("d0", 0.0, 10.0, pages=4.0)
    reading = [Span("p0", 1.0, 9.0), Span("p1", 3.0, 9.0)]
    features, seconds = computed(own, [own], reading, SharedCores(2, 0.0))
    assert seconds == 4.0
    assert features == (1.0, 1.0, 4.0, 0.5)

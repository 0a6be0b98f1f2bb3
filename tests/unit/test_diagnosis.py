from __future__ import annotations

import pytest

from baton.router.observe.diagnosis import diagnose
from baton.router.observe.ledger import AnswerLedger
from baton.router.observe.trends import BUCKET_SECONDS, KEPT_BUCKETS, Histogram, TokenTimes, Trends
from baton.v1 import cluster_pb2 as pb

QUIET = pb.PoolLoad(workers=2, busy_share=0.02, free_share=1.0)
HALF = pb.PoolLoad(workers=2, busy_share=0.5, free_share=0.6, running=2)
FULL = pb.PoolLoad(workers=2, busy_share=0.99, free_share=0.6, running=3, waiting=9)
NO_PAGES = pb.PoolLoad(workers=2, busy_share=0.99, free_share=0.02, running=20, waiting=9)
NONE = pb.PoolLoad()


def traffic(**means: float) -> pb.Traffic:
    spread = pb.Spread(p50=100, p90=200, p99=300)
    lengths = {"prompt_length": spread, "output_length": spread}
    return pb.Traffic(seconds=60, answers=60, prompt_tokens=6000, **lengths, **means)  # type: ignore[arg-type]


CASES = {
    "nothing to do": (pb.Traffic(), QUIET, QUIET, pb.BOUND_IDLE),
    "nobody waits": (traffic(ttft_seconds=1.0, queue_seconds=0.01), HALF, HALF, pb.BOUND_NONE),
    "prompts wait in prefill": (
        traffic(ttft_seconds=4.0, prefill_wait_seconds=3.0, prefill_seconds=0.9),
        FULL,
        HALF,
        pb.BOUND_PREFILL,
    ),
    "prompts wait in the router, decode has room": (
        traffic(ttft_seconds=4.0, queue_seconds=3.0),
        FULL,
        HALF,
        pb.BOUND_PREFILL,
    ),
    "requests wait in the router, decode is full": (
        traffic(ttft_seconds=4.0, queue_seconds=3.0),
        HALF,
        NO_PAGES,
        pb.BOUND_DECODE,
    ),
    "arrived requests wait for a batch": (
        traffic(ttft_seconds=1.0, admit_seconds=2.0),
        HALF,
        HALF,
        pb.BOUND_DECODE,
    ),
    "pages take long": (
        traffic(ttft_seconds=1.0, exposed_seconds=0.5),
        HALF,
        HALF,
        pb.BOUND_TRANSFER,
    ),
    "nobody ended, many wait": (pb.Traffic(), FULL, HALF, pb.BOUND_PREFILL),
    "batches are large": (
        traffic(ttft_seconds=1.0),
        HALF,
        pb.PoolLoad(workers=1, busy_share=1.0, running=40, free_share=0.5),
        pb.BOUND_DECODE,
    ),
    "one answer is written, which keeps decode busy": (
        traffic(ttft_seconds=1.0),
        QUIET,
        pb.PoolLoad(workers=1, busy_share=1.0, running=1, free_share=0.9),
        pb.BOUND_NONE,
    ),
    "one stream, seen between its arrival and its batch": (
        traffic(ttft_seconds=1.0),
        QUIET,
        pb.PoolLoad(workers=1, busy_share=1.0, waiting=1, free_share=0.9),
        pb.BOUND_NONE,
    ),
    "one stream, whose short waits are much of a short time to its first token": (
        traffic(ttft_seconds=0.02, admit_seconds=0.004, prefill_wait_seconds=0.003),
        QUIET,
        pb.PoolLoad(workers=1, busy_share=1.0, running=1, free_share=0.9),
        pb.BOUND_NONE,
    ),
    "many streams, whose short waits are much of a short time to the first token": (
        traffic(ttft_seconds=0.02, admit_seconds=0.004),
        QUIET,
        pb.PoolLoad(workers=1, busy_share=1.0, running=5, free_share=0.9),
        pb.BOUND_DECODE,
    ),
    "one prompt at a time keeps prefill busy": (
        traffic(ttft_seconds=1.0, prefill_seconds=0.99),
        pb.PoolLoad(workers=1, busy_share=0.99, waiting=1, free_share=0.9),
        QUIET,
        pb.BOUND_NONE,
    ),
    "no decode worker": (pb.Traffic(), HALF, NONE, pb.BOUND_WORKERS),
}


@pytest.mark.parametrize("case", CASES)
def test_a_cluster_is_bound_by_what_its_requests_wait_for(case: str) -> None:
    asked, prefill, decode, bound = CASES[case]
    found = diagnose(asked, prefill, decode, queued=0)
    assert found.bound == bound
    assert bool(found.advice) == (bound not in (pb.BOUND_IDLE, pb.BOUND_NONE))


def test_advice_names_the_setting_and_the_numbers() -> None:
    found = diagnose(
        traffic(ttft_seconds=4.0, prefill_wait_seconds=3.0),
        FULL,
        pb.PoolLoad(workers=3, busy_share=0.1, free_share=0.9),
        queued=7,
    )
    assert "run 3 prefill workers instead of 2" in found.advice[0]
    assert "would compute 66% of the time instead of 99%" in found.advice[0]
    assert any("decode's 3 compute 10%" in line for line in found.advice)
    assert any("only 0% of the prompt tokens were cached" in line for line in found.advice)
    assert any("7 requests wait for a worker" in line for line in found.evidence)
    assert any("3.00 s in prefill's" in line for line in found.evidence)


def test_advice_for_decode_says_what_a_worker_more_would_change() -> None:
    decode = pb.PoolLoad(workers=1, busy_share=1.0, running=40, free_share=0.5)
    found = diagnose(traffic(ttft_seconds=1.0), HALF, decode, 0)
    assert found.advice == [
        "run 2 decode workers instead of 1 (decode.workers): a step would serve 20.0 requests"
        " instead of 40.0"
    ]
    lone = diagnose(traffic(ttft_seconds=1.0, admit_seconds=0.5), HALF, HALF, 1)
    assert "(0 now, 500.0 ms on average) could use the new worker's" in lone.advice[0]
    assert "router: 1 request waits for a worker with room" in lone.evidence


def test_a_full_pool_needs_memory_and_a_full_batch_a_larger_one() -> None:
    asked = traffic(ttft_seconds=1.0, admit_seconds=2.0)
    assert "kv_memory" in diagnose(asked, HALF, NO_PAGES, 0).advice[0]
    waiting = pb.PoolLoad(workers=1, busy_share=1.0, running=8, waiting=3, free_share=0.5)
    assert "max_batch" in diagnose(asked, HALF, waiting, 0).advice[0]


def test_guesses_are_evidence_where_there_are_any() -> None:
    decode = pb.PoolLoad(guessed_tokens=2000, accepted_tokens=1500, guessed_steps=1000)
    decode.MergeFrom(HALF)
    evidence = diagnose(pb.Traffic(), HALF, decode, 0).evidence
    assert (
        "speculation: 75% of 2,000 guesses right, 2.5 tokens of a request in a step with guesses"
        in evidence
    )
    assert not any("guesses" in line for line in diagnose(pb.Traffic(), HALF, HALF, 0).evidence)


def test_percentiles_are_within_a_few_percent() -> None:
    histogram = Histogram()
    for value in range(1, 10_001):
        histogram.note(value / 1000)
    for share in (0.5, 0.9, 0.99):
        assert histogram.percentile(share) == pytest.approx(10 * share, rel=0.03)
    assert Histogram().percentile(0.5) == 0.0


def test_traffic_covers_the_last_minute() -> None:
    now = [1000.0]
    times = TokenTimes()
    trends = Trends(times, lambda: now[0])
    ledger = AnswerLedger(0.0, first=2.0, prefill_seconds=1.5, prompt_tokens=100, tokens=10)
    trends.answer(ledger)
    now[0] += 50.0
    trends.answer(ledger)
    trends.first_token(ledger)
    times.add_first(1, now[0])
    times.add(9, 0.1, now[0])
    recent = trends.traffic()
    assert (recent.answers, recent.prompt_tokens, recent.output_tokens) == (
        2,
        200,
        10,
    )
    assert recent.prefill_seconds == pytest.approx(1.5)
    assert recent.itl.p99 == pytest.approx(0.1, rel=0.1)
    now[0] += 30.0
    assert trends.traffic().answers == 1


def test_the_series_includes_empty_buckets_and_is_bounded() -> None:
    now = [1000.0]
    times = TokenTimes()
    trends = Trends(times, lambda: now[0])
    times.add_first(1, now[0])
    now[0] += 5 * BUCKET_SECONDS
    assert [point.sums.output_tokens for point in trends.series()] == [1, 0, 0, 0, 0]
    now[0] += 2 * KEPT_BUCKETS * BUCKET_SECONDS
    assert len(trends.series()) == KEPT_BUCKETS - 1


def test_tokens_count_in_the_bucket_in_which_they_came() -> None:
    now = [1000.0]
    times = TokenTimes()
    trends = Trends(times, lambda: now[0])
    gaps = [1e-7, 0.001, 0.0123, 0.05, 0.3, 7.0]
    expected = Histogram()
    for gap in gaps:
        times.add(2, gap, now[0])
        expected.note(gap, 2)
        now[0] += BUCKET_SECONDS
    points = trends.series()
    assert [point.sums.output_tokens for point in points] == [2] * len(gaps)
    for share in (0.1, 0.5, 0.9):
        assert trends.traffic().itl == expected.spread()
        assert points[2].itl.percentile(share) == pytest.approx(0.0123, rel=0.03)

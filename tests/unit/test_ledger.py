"""Where a request's time goes: whatever is known of it, the parts sum to the whole."""

from __future__ import annotations

import random
import time

import pytest

from baton.prefill_worker.prefill_scheduler import MOST_CHUNKS, ChunkTimes
from baton.router.observe.ledger import AnswerLedger, Ledgers, RequestLedger
from baton.router.observe.time_breakdown import TRAILER_BYTES, answer_phases, answer_timing, trailer
from baton.router.placement.placement import Placement
from baton.v1 import timing_pb2
from baton.v1 import worker_pb2 as pb

SPLIT = Placement("prefill-0", "decode-0")
LOCAL = Placement("", "decode-0")


def whole() -> AnswerLedger:
    """An answer of some tokens, every part of which is known; its marks are seconds."""
    return AnswerLedger(
        arrived=100.0,
        parsed=101.0,
        ready=104.0,
        placed=110.0,
        first=120.0,
        first_text=121.0,
        first_written=122.0,
        second=130.0,
        last=150.0,
        last_text=151.0,
        ended=153.0,
        template_seconds=1.0,
        tokenize_seconds=2.0,
        text_seconds=5.0,
        write_seconds=9.0,
        reserve_seconds=3.0,
        prefill_wait=2.0,
        prefill_seconds=7.0,
        push_seconds=6.0,
        exposed_seconds=4.0,
        admit_seconds=2.0,
        first_decode_seconds=1.0,
        placement=SPLIT,
        attempts=1,
        tokens=9,
        finished=True,
    )


def shown(ledger: AnswerLedger) -> list[tuple[str, float, float]]:
    return [
        (_name(phase), phase.start_seconds, phase.seconds)
        for phase in answer_phases(ledger, ledger.ended)
        if not phase.hidden
    ]


def hidden(ledger: AnswerLedger) -> list[tuple[str, float, float]]:
    return [
        (_name(phase), phase.start_seconds, phase.seconds)
        for phase in answer_phases(ledger, ledger.ended)
        if phase.hidden
    ]


def _name(phase: timing_pb2.Phase) -> str:
    return timing_pb2.PhaseKind.Name(phase.kind).removeprefix("PHASE_KIND_").lower()


def test_each_phase_has_its_place() -> None:
    assert shown(whole()) == [
        ("parse", 0.0, 1.0),
        ("template", 1.0, 1.0),
        ("tokenize", 2.0, 2.0),
        ("queue", 4.0, 6.0),
        ("prefill_wait", 10.0, 2.0),
        ("prefill", 12.0, 7.0),
        ("network", 19.0, 1.0),
        ("detokenize", 20.0, 1.0),
        ("write", 21.0, 1.0),
        # Of its four seconds two went by while the first token was written.
        ("transfer", 22.0, 2.0),
        ("admit", 24.0, 2.0),
        ("first_decode", 26.0, 1.0),
        ("network", 27.0, 3.0),
        ("decode", 30.0, 17.0),
        ("detokenize", 47.0, 4.0),
        ("write", 51.0, 2.0),
    ]


def test_phases_behind_others_are_hidden() -> None:
    assert hidden(whole()) == [
        ("reserve", 10.0, 3.0),
        ("transfer", 16.0, 4.0),
        ("write", 22.0, 6.0),
    ]


def test_a_late_reservation_is_exposed() -> None:
    ledger = whole()
    ledger.reserve_seconds = 13.0
    assert ("reserve", 22.0, 1.0) in shown(ledger)
    assert ("transfer", 23.0, 1.0) in shown(ledger)


def test_an_attempt_lost_before_the_first_token_is_a_retry_phase() -> None:
    ledger = whole()
    ledger.lost_before = 4.0
    assert shown(ledger)[3:5] == [("retry", 4.0, 4.0), ("queue", 8.0, 2.0)]


def test_without_streaming_the_first_token_counts_when_it_is_ready() -> None:
    ledger = whole()
    ledger.first_written = 0.0
    assert answer_timing(ledger, 0).ttft_seconds == 21.0
    assert sum(seconds for _, start, seconds in shown(ledger) if start < 21.0) == 21.0


@pytest.mark.parametrize("reached", range(1, 11))
def test_a_request_that_ends_early_has_the_phases_so_far(reached: int) -> None:
    ledger = whole()
    marks = ["parsed", "ready", "placed", "first", "first_text", "first_written", "second"]
    for name in marks[reached:]:
        setattr(ledger, name, 0.0)
    if not ledger.second:
        ledger.last, ledger.last_text = ledger.first, ledger.first_text
    ledger.finished = False
    assert sum(seconds for _, _, seconds in shown(ledger)) == pytest.approx(53.0)


def test_the_parts_sum_to_the_whole_whatever_workers_report() -> None:
    draw = random.Random(7)
    told = ["template", "tokenize", "text", "write", "reserve", "push", "exposed", "admit"]
    for _ in range(300):
        ledger = whole()
        for name in (*(f"{each}_seconds" for each in told), "prefill_wait", "prefill_seconds"):
            setattr(ledger, name, draw.choice([0.0, draw.expovariate(0.2)]))
        ledger.lost_before, ledger.lost_after = draw.random() * 9, draw.random() * 30
        ledger.first_written = draw.choice([0.0, draw.uniform(121.0, 153.0)])
        timing = answer_timing(ledger, 0)
        parts = shown(ledger)
        assert sum(seconds for _, _, seconds in parts) == pytest.approx(53.0, rel=1e-5)
        before = sum(each for _, start, each in parts if start < timing.ttft_seconds - 1e-4)
        assert before == pytest.approx(timing.ttft_seconds, rel=1e-5)


def test_a_local_prefill_is_a_prefill_phase() -> None:
    ledger = AnswerLedger(time.monotonic())
    ledger.place(LOCAL)
    step = pb.StepTokens(queue_seconds=2.0, compute_seconds=3.0, cached_tokens=16)
    ledger.note_step(step)
    told = (ledger.prefill_wait, ledger.prefill_seconds, ledger.cached_tokens)
    assert told == (2.0, 3.0, 16)


def test_attempts_after_the_first_token_do_not_change_its_phases() -> None:
    ledger = AnswerLedger(time.monotonic())
    ledger.place(SPLIT)
    ledger.note_first_token(pb.FirstToken(compute_seconds=2.0))
    ledger.note_tokens(1)
    ledger.lose()
    ledger.place(LOCAL)
    ledger.note_first_token(pb.FirstToken(compute_seconds=9.0))
    ledger.note_tokens(1)
    assert (ledger.prefill_seconds, ledger.placement, ledger.attempts) == (2.0, SPLIT, 2)
    assert ledger.lost_after == pytest.approx(ledger.last - ledger.first)


def test_only_the_latest_requests_are_kept() -> None:
    ledgers = Ledgers(limit=2)
    for name in ("a", "b", "a", "c"):
        with ledgers.keep(RequestLedger(name, time.monotonic())) as ledger:
            ledger.outcome = "STOP"
    assert [ledger.request_id for ledger in ledgers.recent(9)] == ["c", "a"]
    assert ledgers.find("b") is None


def test_a_running_request_is_kept_and_a_refused_one_is_not() -> None:
    ledgers = Ledgers()
    with ledgers.keep(RequestLedger("a", time.monotonic())):
        assert ledgers.find("a") is not None
    assert ledgers.find("a") is None


def test_a_trailer_fits_with_many_answers() -> None:
    ledger = RequestLedger("r", 100.0)
    ledger.answers, ledger.ended = [whole() for _ in range(64)], 153.0
    packed = trailer(ledger)
    assert len(packed) <= TRAILER_BYTES
    assert timing_pb2.RequestTiming.FromString(packed).answers


def test_chunk_times_are_joined_to_bound_their_number() -> None:
    chunks = ChunkTimes()
    chunks.begin(16, 50.0)
    for number in range(1, 1001):
        chunks.end(16 + 8 * number, 50.0 + number)
    assert len(chunks.chunks) <= MOST_CHUNKS
    assert sum(chunk.tokens for chunk in chunks.chunks) == 8000
    assert sum(chunk.seconds for chunk in chunks.chunks) == pytest.approx(1000.0)

"""The pure parts of bench/trace.py: what is sent, and what is made of the outcomes."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from baton.planner.trace import TraceRequest, read_trace
from bench.trace_replay import Outcome
from bench.trace_report import Objective, Summary, Verdict, summarize
from bench.trace_sweep import Repeats, is_never_worse
from bench.trace_workload import (
    FreshPrompts,
    Synthesis,
    TimedRequest,
    infinite_cache_hits,
    sessions,
    slice_of_sessions,
    slice_of_time,
    with_loads,
)


def request(seconds: float, blocks: list[int], rest: int = 0, output: int = 64) -> TraceRequest:
    """A prompt of `blocks`, of which the last holds `rest` tokens unless that is 0."""
    length = 512 * len(blocks) - (512 - rest if rest else 0)
    return TraceRequest(seconds, length, output, tuple(blocks))


def synthesis(scale: Fraction = Fraction(1, 32), speed: float = 1.0, seed: int = 0) -> Synthesis:
    return Synthesis(scale, speed, seed)


def prompts(chosen: list[TraceRequest], made: Synthesis) -> list[tuple[int, ...]]:
    return [each.prompt for each in made.requests(chosen)]


def shared_tokens(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


# Three sessions behind one system prompt (block 0): 1-2-3 in three turns, 7 in two, 9 alone.
CHAT = [
    request(0.0, [0, 1]),
    request(1.0, [0, 7, 70], rest=100),
    request(2.0, [0, 1, 2]),
    request(3.0, [0, 9]),
    request(4.0, [0, 1, 2, 3], rest=10),
    request(5.0, [0, 7, 8]),
]


def test_a_trace_is_read_in_the_order_of_its_time(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000, "input_length": 513, "output_length": 2, "hash_ids": [0, 1]},
        {"timestamp": 0, "input_length": 512, "output_length": 9, "hash_ids": [0]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_trace(path) == [TraceRequest(0.0, 512, 9, (0,)), TraceRequest(3.0, 513, 2, (0, 1))]


def test_a_length_that_is_not_its_blocks_is_refused(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 513, "output_length": 2, "hash_ids": [0]}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(line))
    with pytest.raises(ValueError, match="513 tokens are not 1 blocks"):
        read_trace(path)


@pytest.mark.parametrize("scale", [Fraction(1), Fraction(1, 16), Fraction(1, 32), Fraction(1, 64)])
def test_prompts_share_exactly_the_blocks_that_the_trace_says(scale: Fraction) -> None:
    made = prompts(CHAT, synthesis(scale))
    for one, mine in zip(CHAT, made, strict=True):
        for other, theirs in zip(CHAT, made, strict=True):
            if one is not other:
                blocks = shared_tokens(one.blocks, other.blocks)
                assert shared_tokens(mine, theirs) == blocks * 512 * scale


def test_a_scaled_prompt_keeps_its_length_and_its_partial_block() -> None:
    chosen = [request(0.0, [0, 1], rest=256), request(0.0, [0, 1], rest=1), request(0.0, [0, 1])]
    assert list(map(len, prompts(chosen, synthesis()))) == [24, 17, 32]
    assert list(map(synthesis().prompt_length, chosen)) == [24, 17, 32]


def test_a_shorter_prompt_of_the_same_blocks_is_the_beginning_of_the_longer() -> None:
    part, whole = prompts([request(0.0, [0, 1], rest=256), request(0.0, [0, 1])], synthesis())
    assert part == whole[: len(part)]


def test_the_same_seed_makes_the_same_tokens_and_another_seed_others() -> None:
    assert prompts(CHAT, synthesis(seed=1)) == prompts(CHAT, synthesis(seed=1))
    (one, *_), (other, *_) = prompts(CHAT, synthesis(seed=1)), prompts(CHAT, synthesis(seed=2))
    assert shared_tokens(one, other) == 0


def test_a_scale_that_cuts_blocks_into_parts_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no whole number"):
        synthesis(scale=Fraction(1, 3))


def test_times_and_answers_are_scaled_and_start_at_the_first_request() -> None:
    first, second = synthesis(speed=4.0).requests([CHAT[2], CHAT[4]])
    assert (first.seconds, second.seconds) == (0.0, 0.5)
    assert first.answer_tokens == 2


def test_an_answer_has_at_least_one_token() -> None:
    (made,) = synthesis().requests([request(0.0, [0], output=1)])
    assert made.answer_tokens == 1


def test_fresh_prompts_share_nothing() -> None:
    drawn = FreshPrompts(0)
    assert shared_tokens(drawn.draw(50), drawn.draw(50)) == 0


def test_sessions_share_only_what_all_requests_share() -> None:
    assert sorted(sorted(each.seconds for each in part) for part in sessions(CHAT)) == [
        [0.0, 2.0, 4.0],
        [1.0, 5.0],
        [3.0],
    ]


def test_requests_without_a_common_block_are_told_apart_by_their_first() -> None:
    parts = sessions([request(0.0, [1]), request(1.0, [2, 3]), request(2.0, [1, 4])])
    assert [[each.seconds for each in part] for part in parts] == [[0.0, 2.0], [1.0]]


def test_a_prompt_of_nothing_but_the_common_blocks_is_a_session_of_its_own() -> None:
    parts = sessions([request(0.0, [0]), request(1.0, [0]), request(2.0, [0, 1])])
    assert [len(part) for part in parts] == [1, 1, 1]


@pytest.mark.parametrize("seed", range(5))
def test_a_slice_of_sessions_has_whole_sessions_in_the_order_of_time(seed: int) -> None:
    chosen = slice_of_sessions(sessions(CHAT), 4, seed)
    assert chosen == sorted(chosen, key=lambda each: each.seconds)
    for part in sessions(CHAT):
        assert len([each for each in part if each in chosen]) in (0, len(part))


def test_slices_are_the_same_for_the_same_seed() -> None:
    trace = [request(float(at), [0, at % 30 + 1]) for at in range(100)]
    parts = sessions(trace)
    assert slice_of_sessions(parts, 20, 3) == slice_of_sessions(parts, 20, 3)
    assert slice_of_sessions(parts, 20, 3) != slice_of_sessions(parts, 20, 4)
    assert slice_of_time(trace, 20, 3) == slice_of_time(trace, 20, 3)
    assert slice_of_time(trace, 20, 3) != slice_of_time(trace, 20, 5)


def test_a_slice_of_time_is_a_row_of_neighbours() -> None:
    trace = [request(float(at), [0, at + 1]) for at in range(100)]
    chosen = [each.seconds for each in slice_of_time(trace, 10, 0)]
    assert chosen == [chosen[0] + at for at in range(10)]


def test_a_slice_longer_than_the_trace_is_the_trace() -> None:
    assert slice_of_time(CHAT, 50, 0) == CHAT
    assert slice_of_sessions(sessions(CHAT), 50, 0) == CHAT


@pytest.mark.parametrize(
    ("sent", "hits"),
    [
        ([], 0),
        # Nothing is held when the first comes; the second has its two full pages.
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 4),
        # The last page holds the last token, which is always computed.
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 2),
        # Half a page in common is nothing in common.
        ([[1, 2, 3, 4], [1, 2, 3, 9, 9]], 2),
        # The same tokens after another beginning are another page.
        ([[1, 2, 3, 4, 5], [9, 9, 3, 4, 5]], 0),
        # What was held once is held for ever, whoever brought it.
        ([[1, 2, 3], [7, 8, 9], [1, 2, 5, 6, 7], [1, 2, 5, 6, 9]], 2 + 4),
    ],
)
def test_an_infinite_cache_hits_the_full_pages_seen_before(
    sent: list[list[int]], hits: int
) -> None:
    assert infinite_cache_hits(sent, page_size=2) == hits


def test_an_infinite_cache_hits_what_the_trace_repeats() -> None:
    made = prompts(CHAT, synthesis())
    found_blocks = [0, 1, 2, 1, 3, 2]
    assert infinite_cache_hits(made, page_size=16) == 16 * sum(found_blocks)


def test_gaps_lie_between_neighbouring_tokens() -> None:
    assert Outcome(8, (1.0, 1.5, 3.0)).gaps == [0.5, 1.5]


@pytest.mark.parametrize(
    ("outcome", "good"),
    [
        (Outcome(8, (1.0, 1.1, 1.4)), True),
        (Outcome(8, (1.0,)), True),
        (Outcome(8, (1.1, 1.2)), False),
        (Outcome(8, (0.5, 1.0)), False),
        (Outcome(8, error="Unavailable: no router"), False),
    ],
)
def test_a_good_answer_keeps_to_both_objectives(outcome: Outcome, good: bool) -> None:
    assert Objective(ttft=1.0, itl=0.2).is_met(outcome) is good


def test_a_summary_counts_tokens_of_answers_and_errors_apart() -> None:
    outcomes = [
        Outcome(100, (0.5, 0.6), cached_tokens=60, reason_code="cached"),
        Outcome(100, (2.0, 2.1), local=True, reason_code="local_faster"),
        Outcome(800, error="Unavailable: gone"),
    ]
    summary = summarize(outcomes, Objective(1.0, 0.2), seconds=4.0)
    assert (summary.requests, summary.errors) == (3, {"Unavailable: gone": 1})
    assert (summary.prompt_tokens, summary.cached_tokens) == (200, 60)
    assert (summary.local, summary.reasons) == (1, {"cached": 1, "local_faster": 1})
    assert (summary.good, summary.goodput) == (1, 0.25)
    assert summary.ttft.mean == 1.25


@pytest.mark.parametrize(
    ("auto", "never", "always", "holds"),
    [
        ((2.0, 2.0), (2.0, 2.0), (1.0, 1.0), True),
        ((1.9, 1.9), (2.0, 2.0), (1.0, 1.0), False),
        ((1.8, 2.0), (1.9, 2.1), (1.0, 1.0), True),
        ((1.5, 1.5), (1.0, 1.0), (2.0, 2.0), False),
    ],
)
def test_never_worse_is_judged_against_the_better_mode_within_the_noise(
    auto: tuple[float, ...], never: tuple[float, ...], always: tuple[float, ...], holds: bool
) -> None:
    found = {"auto": Repeats(auto), "never": Repeats(never), "always": Repeats(always)}
    assert is_never_worse(found) is holds


def ran(cached: int, ttft: float) -> Summary:
    outcomes = [Outcome(100, (ttft, ttft), cached_tokens=cached)]
    return summarize(outcomes, Objective(1.0, 1.0), seconds=1.0)


@pytest.mark.parametrize(
    ("cached", "ttft", "enough", "fastest"),
    [(38, 0.9, True, True), (37, 0.9, False, True), (40, 1.0, True, False)],
)
def test_knowing_what_workers_hold_must_pay_in_hits_and_in_time(
    cached: int, ttft: float, enough: bool, fastest: bool
) -> None:
    summaries = {"kv_aware": ran(cached, ttft), "least_loaded": ran(9, 1.0), "other": ran(9, 2.0)}
    verdict = Verdict.of(summaries, infinite_rate=0.4)
    assert (verdict.hits_enough, verdict.is_fastest) == (enough, fastest)
    assert verdict.holds is (enough and fastest)


def test_a_slice_is_as_dense_as_its_parts_say() -> None:
    requests = [TimedRequest(float(at), (1,), 2) for at in range(91)]
    sent = [each.seconds for each in with_loads(requests, (1.0, 2.0, 1.0, 0.5))]
    counts = [sum(20 * part <= at < 20 * part + 20 for at in sent) for part in range(4)]
    assert counts == [20, 40, 20, 10]
    assert (sent[0], sent[-1]) == (0.0, 80.0)
    assert sent == sorted(sent)

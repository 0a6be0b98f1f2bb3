"""Answers' text; stop strings against a search over the whole text."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from baton.core.errors import InvalidRequest
from baton.core.types import FinishReason
from baton.router.answers.answer import AnswerText, StopStrings
from baton.router.requests.attempt import Tokens

WORDS = {1: "a", 2: "b", 3: "c", 9: "<end>"}


class Letters:
    """A detokenizer whose tokens are letters; one stays back until the next comes."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, ids: Iterable[int]) -> str:
        text = self._held + "".join(WORDS[token] for token in ids)
        self._held = text[-1:]
        return text[:-1]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def push_all(answer: AnswerText, *events: Tokens) -> tuple[str, list[int]]:
    text, tokens = "", []
    for event in events:
        before = answer.count
        text += answer.push(event.token_ids, event.finish)
        tokens += event.token_ids[: answer.count - before]
    return text, tokens


def tokens(*ids: int, finish: FinishReason | None = None) -> Tokens:
    return Tokens(list(ids), finish)


def test_the_end_flushes_the_detokenizer() -> None:
    answer = AnswerText(Letters(), [])
    assert push_all(answer, tokens(1), tokens(2, finish=FinishReason.LENGTH)) == ("ab", [1, 2])
    assert (answer.finish, answer.count) == (FinishReason.LENGTH, 2)


def test_the_token_that_ends_an_answer_has_no_text() -> None:
    answer = AnswerText(Letters(), [])
    assert push_all(answer, tokens(1, 9, finish=FinishReason.STOP)) == ("a", [1, 9])
    assert answer.finish is FinishReason.STOP


def test_tokens_after_a_stop_string_are_dropped() -> None:
    answer = AnswerText(Letters(), ["b"])
    assert push_all(answer, tokens(1, 2, 3, 1, 1)) == ("a", [1, 2, 3])
    assert (answer.finish, answer.stops.hit, answer.count) == (FinishReason.STOP, "b", 3)


def test_a_stop_string_is_found_in_flushed_text() -> None:
    answer = AnswerText(Letters(), ["c"])
    assert push_all(answer, tokens(1, 3, finish=FinishReason.LENGTH)) == ("a", [1, 3])
    assert (answer.finish, answer.stops.hit) == (FinishReason.STOP, "c")


@pytest.mark.parametrize("stop", [["ab"], ["bc", "ab"]])
def test_a_stop_string_may_straddle_messages(stop: list[str]) -> None:
    answer = AnswerText(Letters(), stop)
    text, _ = push_all(answer, tokens(3), tokens(1), tokens(2), tokens(3), tokens(3))
    assert (text, answer.stops.hit) == ("c", "ab")


def cut_whole(text: str, stops: list[str]) -> str:
    """The reference: the text before the stop string that starts earliest."""
    starts = [text.find(stop) for stop in stops if stop in text]
    return text[: min(starts)] if starts else text


def stream(pieces: list[str], stops: list[str]) -> tuple[str, str]:
    filtered = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += filtered.push(piece)
        if filtered.hit:
            return shown, filtered.hit
    return shown + filtered.push("", last=True), filtered.hit


def split(text: str, chooser: random.Random) -> list[str]:
    cuts = sorted(chooser.choices(range(len(text) + 1), k=chooser.randrange(6)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("alphabet", ["ab", "abc", "é界😀"])
def test_any_split_cuts_where_the_whole_text_is_cut(alphabet: str) -> None:
    chooser = random.Random(alphabet)
    for _ in range(4000):
        text = "".join(chooser.choices(alphabet, k=chooser.randrange(25)))
        stops = [
            "".join(chooser.choices(alphabet, k=chooser.randint(1, 6)))
            for _ in range(chooser.randint(1, 4))
        ]
        shown, hit = stream(split(text, chooser), stops)
        assert shown == cut_whole(text, stops), (text, stops)
        assert bool(hit) == any(stop in text for stop in stops)
        assert not hit or text[len(shown) :].startswith(hit)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    chooser = random.Random(1)
    for _ in range(2000):
        stops = ["".join(chooser.choices("ab", k=chooser.randint(1, 5))) for _ in range(2)]
        text = "".join(chooser.choices("abc", k=12))
        filtered = StopStrings(stops)
        shown = ""
        for end in range(1, len(text) + 1):
            shown += filtered.push(text[end - 1])
            if filtered.hit:
                break
            held = text[len(shown) : end]
            assert held == "" or any(stop.startswith(held) for stop in stops), (text, stops)


def test_a_stop_string_that_overlaps_itself_is_found() -> None:
    assert stream(["a", "a", "a", "b"], ["aab"]) == ("a", "aab")


def test_a_stop_string_across_pieces_is_found() -> None:
    assert stream(["Hello wo", "rl", "d and more"], ["world"]) == ("Hello ", "world")


def test_of_two_stop_strings_the_earlier_start_wins() -> None:
    assert stream(["ab", "cd"], ["bc", "abcd"]) == ("", "abcd")
    assert stream(["abc", "x"], ["bc", "abcd"]) == ("a", "bc")


def test_of_two_stop_strings_with_one_start_the_longest_at_hand_is_named() -> None:
    assert stream(["xabcd"], ["ab", "abcd"]) == ("x", "abcd")
    assert stream(["xab", "cd"], ["ab", "abcd"]) == ("x", "ab")


def test_the_end_decides_for_a_match_that_was_waiting() -> None:
    assert stream(["abc"], ["bc", "abcd"]) == ("a", "bc")


def test_the_end_gives_back_what_was_held() -> None:
    assert stream(["so ST"], ["STOP"]) == ("so ST", "")


def test_without_stop_strings_all_text_passes_at_once() -> None:
    assert StopStrings([]).push("anything") == "anything"


def test_nothing_passes_after_a_stop_string() -> None:
    filtered = StopStrings(["x"])
    assert (filtered.push("axb"), filtered.hit) == ("a", "x")
    assert (filtered.push("c"), filtered.hit) == ("", "x")
    assert filtered.push("", last=True) == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        StopStrings(["a", ""])


def test_a_long_near_match_does_not_slow_the_stream() -> None:
    stop = "a" * 20_000 + "b"
    text = "a" * 60_000
    shown, hit = stream([text[i : i + 4] for i in range(0, len(text), 4)], [stop])
    assert (shown, hit) == (text, "")

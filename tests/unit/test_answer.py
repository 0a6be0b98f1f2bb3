from __future__ import annotations

from collections.abc import Iterable

import pytest

from baton.core.types import FinishReason
from baton.router.answers.answer import AnswerText
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
    assert (answer.finish, answer.stop, answer.count) == (FinishReason.STOP, "b", 3)


def test_a_stop_string_is_found_in_flushed_text() -> None:
    answer = AnswerText(Letters(), ["c"])
    assert push_all(answer, tokens(1, 3, finish=FinishReason.LENGTH)) == ("a", [1, 3])
    assert (answer.finish, answer.stop) == (FinishReason.STOP, "c")


@pytest.mark.parametrize("stop", [["ab"], ["bc", "ab"]])
def test_a_stop_string_may_straddle_messages(stop: list[str]) -> None:
    answer = AnswerText(Letters(), stop)
    text, _ = push_all(answer, tokens(3), tokens(1), tokens(2), tokens(3), tokens(3))
    assert (text, answer.stop) == ("c", "ab")

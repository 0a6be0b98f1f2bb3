"""Texts that an answer copies with changes are followed beyond these."""

from __future__ import annotations

import random

from baton.engine.prompt_lookup import MOST_MATCHES, PromptLookup, new_acceptance

TEXT = list(range(100, 160))


def followed(prompt: list[int], answer: list[int]) -> PromptLookup:
    """Behind the answer's last token."""
    tokens = [*prompt, answer[0]]
    lookup = PromptLookup(tokens, len(prompt))
    for token in answer[1:]:
        tokens.append(token)
        lookup.follow()
    return lookup


def right_guesses(prompt: list[int], answer: list[int]) -> list[bool]:
    """Whether each token of the answer was guessed from those before it."""
    return [
        followed(prompt, answer[:length]).offer(1).guesses == [answer[length]]
        for length in range(1, len(answer))
    ]


def test_a_text_goes_on_behind_a_token_that_was_replaced() -> None:
    assert followed(TEXT, [*TEXT[:10], 7]).offer(3).guesses == TEXT[11:14]


def test_a_text_goes_on_behind_tokens_that_were_left_out() -> None:
    assert followed(TEXT, [*TEXT[:10], TEXT[14]]).offer(3).guesses == TEXT[15:18]


def test_a_text_goes_on_behind_the_first_token_that_is_found_again() -> None:
    assert followed(TEXT, [*TEXT[:10], 7, 8]).offer(3).guesses == []
    assert followed(TEXT, [*TEXT[:10], 7, 8, TEXT[10]]).offer(3).guesses == TEXT[11:14]
    assert followed(TEXT, [*TEXT[:10], 7, 8, 9, TEXT[12]]).offer(3).guesses == TEXT[13:16]


def test_a_text_is_dropped_that_is_not_found_again() -> None:
    other = list(range(200, 240))
    lookup = followed(TEXT, [*TEXT[:10], *other])
    assert lookup._matches == []
    assert followed(TEXT, [*TEXT[:10], *other, TEXT[11]]).offer(3).guesses == []


def test_an_edit_is_guessed_again_where_the_text_comes_to_the_same_tokens() -> None:
    fields = [[*range(number, number + 5), 1, 2] for number in range(100, 180, 10)]
    text = [token for field in fields for token in field]
    # 2 becomes 3, 4, 5.
    answer = [token for field in fields for token in (*field[:6], 3, 4, 5)]
    right = right_guesses(text, answer)
    assert all(right[9:17])
    assert all(right[18:]), "when the answer repeats itself as well"
    behind = followed(text, answer[:14])
    assert behind.offer(12).guesses == answer[14:26]
    chances = behind.offer(12).chances
    assert chances == sorted(chances, reverse=True)
    assert len(chances) == 12


def test_tokens_inserted_and_left_out_again_are_guessed() -> None:
    fields = [[number, number + 20, number + 40, 1, 2] for number in range(100, 108)]
    text = [token for field in fields for token in field]
    inserted = [token for field in fields for token in (*field[:4], 9, 2)]
    assert all(right_guesses(text, inserted)[12:])
    left_out = [token for field in fields for token in field[:4]]
    assert all(right_guesses(text, left_out)[10:])


def test_an_edit_that_does_not_come_again_is_forgotten() -> None:
    fields = [[number, number + 20, 1, 2] for number in range(100, 112)]
    text = [token for field in fields for token in field]
    once = [*text[:7], 3, *text[8:]]
    assert all(right_guesses(text, once)[11:])


def test_a_place_followed_for_long_is_preferred_to_a_later_one() -> None:
    later = [*TEXT[20:24], *range(300, 320)]
    lookup = followed([*TEXT, *later], TEXT[:24])
    assert lookup.offer(3).guesses == TEXT[24:27]


def test_few_places_are_followed_and_kept_in_bounds() -> None:
    draw = random.Random(0)
    for words in (2, 3, 5, 20):
        tokens = [draw.randrange(words) for _ in range(50)]
        past = [PromptLookup([draw.randrange(words) for _ in range(40)], 40)._own]
        lookup = PromptLookup(tokens, 50, [1, 0, 1, 1], past, new_acceptance())
        for _ in range(400):
            tokens += [draw.randrange(words) for _ in range(draw.choice((1, 1, 4)))]
            lookup.follow()
            guesses, chances = lookup.offer(8)
            assert len(chances) == len(guesses) <= 8
            assert lookup._own.tokens == [1, 0, 1, 1, *tokens]
            assert len(lookup._matches) <= MOST_MATCHES

"""How many tokens are guessed, by what steps cost and how likely the guesses are."""

from __future__ import annotations

import random

from baton.core.types import AttemptKey, Sampling, Work
from baton.decode_worker.decode_scheduler import DecodeScheduler
from baton.decode_worker.speculation import MOST_FOLLOWED, Speculation
from baton.engine.page_pool import PagePool
from baton.engine.sequence import Sequence


def repeating(pool: PagePool, count: int, answer: int = 100) -> list[Sequence]:
    """Sequences about to decode, whose next tokens are guessed."""
    prompt = [*range(10, 40), *range(10, 20)]
    made = []
    for number in range(count):
        work = Work(AttemptKey(str(number), 1), prompt, Sampling(), answer, frozenset({25}))
        sequence = Sequence(work, pool.acquire(pool.pages_for(len(prompt))))
        sequence.computed = len(prompt) - 1
        made.append(sequence)
    return made


def guessed(sequences: list[Sequence], rows: int = 64, pages: int = 64) -> list[list[int]]:
    Speculation().guess(dict.fromkeys(sequences, 1), rows, sequences[0].lease._pool, pages)
    return [each.guesses for each in sequences]


def test_guesses_end_before_a_stop_token_and_the_last_token() -> None:
    pool = PagePool(100, 4)
    answers = {100: [20, 21, 22, 23, 24], 3: [20, 21], 1: []}
    for most, expected in answers.items():
        (sequence,) = repeating(pool, 1, most)
        assert Speculation()._found(sequence).guesses == expected


def test_guesses_keep_to_their_rows_and_pages() -> None:
    pool = PagePool(100, 4)
    assert sum(map(len, guessed(repeating(pool, 4), rows=3))) == 3
    # Their last pages are full.
    assert sum(map(bool, guessed(repeating(pool, 3), pages=1))) == 1
    assert guessed(repeating(pool, 1), pages=-2) == [[]]


def test_guesses_end_where_a_row_costs_what_it_brings() -> None:
    pool, speculation = PagePool(100, 4), Speculation()
    draw = random.Random(0)
    for rows in draw.choices((1, 2, 4, 8), k=400):
        speculation.note_step(rows, 0.001 + 0.02 * rows)
    (sequence,) = repeating(pool, 1)
    speculation.guess({sequence: 1}, 64, pool, 64)
    assert sequence.guesses == []
    for rows in draw.choices((1, 2, 4, 8), k=400):
        speculation.note_step(rows, 0.02 + 0.0005 * rows)
    speculation.guess({sequence: 1}, 64, pool, 64)
    assert len(sequence.guesses) > 2


def rows_of_steps(count: int, steps: int) -> list[int]:
    """Of steps in which `count` sequences are guessed, on a device that computes while it reads
    the weights."""
    pool, speculation = PagePool(200, 4), Speculation()
    sequences = repeating(pool, count)
    rows = []
    for _ in range(steps):
        speculation.guess(dict.fromkeys(sequences, 1), 64, pool, 64)
        rows.append(sum(1 + len(each.take_guesses()) for each in sequences))
        speculation.note_step(rows[-1], max(0.02, 0.0048 * rows[-1]))
    return rows


def test_guesses_that_make_a_batch_slower_end_and_others_go_on() -> None:
    one, eight = rows_of_steps(1, 100), rows_of_steps(8, 100)
    assert max(eight[8:]) <= 16, "a trial fills a block, though each guess is likely to be right"
    assert sum(rows > 8 for rows in eight[8:]) == 1, "one trial"
    assert max(one) <= 8
    assert sum(rows > 2 for rows in one) > 80
    assert 1 in one[-40:], "a step without guesses is measured now and then"


def running_ahead(seconds: float) -> Speculation:
    """Steps of 10 ms, and some `seconds` more where the device waits."""
    speculation = Speculation(runs_ahead=True)
    draw = random.Random(0)
    for _ in range(200):
        rows, waited = draw.choice((1, 2, 8)), draw.random() < 0.5
        speculation.note_step(rows, 0.01 + 1e-5 * rows + seconds * waited, waited)
    return speculation


def test_a_step_waits_for_tokens_where_guesses_bring_more_than_the_wait_costs() -> None:
    pool = PagePool(100, 4)
    (sequence,) = repeating(pool, 1)
    sequence.expected, sequence.computed = 1, sequence.computed + 1
    quick, slow = running_ahead(0.0005), running_ahead(0.2)
    assert quick.waits({sequence: 1}, 64)
    assert not slow.waits({sequence: 1}, 64)
    quick.guess({sequence: 1}, 64, pool, 64)
    assert not sequence.guesses, "its last token is not known"
    sequence.expected, sequence.computed = 0, sequence.computed - 1
    assert not quick.waits({sequence: 1}, 64)
    slow.guess({sequence: 1}, 64, pool, 64)
    assert not sequence.guesses
    quick.guess({sequence: 1}, 64, pool, 64)
    assert sequence.guesses


def test_nothing_is_looked_up_ahead_of_many_requests() -> None:
    sequences = repeating(PagePool(1000, 4), MOST_FOLLOWED + 1)
    for each in sequences:
        each.expected, each.computed = 1, each.computed + 1
    assert not running_ahead(0.0).waits(dict.fromkeys(sequences, 1), 64)
    assert running_ahead(0.0).waits(dict.fromkeys(sequences[1:], 1), 64)
    assert sequences[0].lookup is None


def test_all_requests_wait_for_guesses_in_flight() -> None:
    pool = PagePool(100, 4)
    scheduler = DecodeScheduler(pool, 8, 64, running_ahead(0.0))
    first, second = repeating(pool, 2)
    scheduler._running += [first, second]
    assert scheduler.next() == {first: 1, second: 1}
    assert first.guesses
    for each in (first, second):
        each.launched(1)
    second.guesses = []
    assert scheduler.next() == {}


def test_a_gpus_batch_guesses_before_steps_of_other_sizes_were_measured() -> None:
    sequences = repeating(PagePool(1000, 4), 32)
    speculation = Speculation(runs_ahead=True)
    for _ in range(20):
        speculation.note_step(len(sequences), 0.0051)
    for each in sequences:
        each.expected, each.computed = 1, each.computed + 1
    assert speculation.waits(dict.fromkeys(sequences, 1), 200)

"""The order in which idle pages are evicted, with retained ones among them."""

from __future__ import annotations

import random

import pytest

from baton.engine.prefix_cache import IdlePages


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def idle(clock: Clock, *pages: tuple[int, float], most_retained: int = 8) -> IdlePages:
    """Pages, each with how long it is retained from now on, used in this order."""
    made = IdlePages(most_retained, clock)
    for page, seconds in pages:
        made.add(page, clock.now + seconds if seconds else 0.0)
    return made


def test_what_is_retained_goes_after_what_was_used_later(clock: Clock) -> None:
    assert idle(clock, (1, 60), (2, 0), (3, 0)).pop(3) == [2, 3, 1]


def test_a_retained_page_goes_where_no_other_is_left_the_first_to_end_first(clock: Clock) -> None:
    made = idle(clock, (1, 90), (2, 30), (3, 60), (4, 0))
    assert made.pop(2) == [4, 2]
    assert made.pop(2) == [3, 1]
    assert len(made) == 0


def test_pages_of_one_end_go_in_the_order_of_their_use(clock: Clock) -> None:
    assert idle(clock, (3, 60), (2, 60), (1, 60)).pop(3) == [3, 2, 1]


def test_a_page_whose_time_is_over_counts_as_used_at_its_end(clock: Clock) -> None:
    made = idle(clock, (1, 60), (2, 0))
    clock.now += 61
    made.add(3, 0.0)
    assert made.pop(3) == [2, 1, 3]


def test_a_time_that_is_over_retains_nothing(clock: Clock) -> None:
    made = IdlePages(8, clock)
    made.add(1, clock.now - 1)
    made.add(2, 0.0)
    assert made.pop(2) == [1, 2]


def test_no_more_than_the_most_are_retained(clock: Clock) -> None:
    made = idle(clock, (1, 60), (2, 90), (3, 30), (4, 0), most_retained=2)
    assert made.pop(2) == [3, 4], "page 3 lost its time when it came, and page 4 came later"
    assert IdlePages(0, clock).pop(0) == []
    assert idle(clock, (1, 60), (2, 0), most_retained=0).pop(1) == [1]


def test_a_page_that_is_used_again_leaves_its_place(clock: Clock) -> None:
    made = idle(clock, (1, 60), (2, 60))
    made.discard(1)
    made.add(1, 0.0)
    made.touch(2, clock.now + 90)
    made.touch(7, clock.now + 90)
    assert made.pop(2) == [1, 2]
    assert len(made) == 0


def test_excluded_pages_keep_their_places(clock: Clock) -> None:
    made = idle(clock, (1, 0), (2, 30), (3, 60), (4, 90))
    assert made.pop(2, without={1, 2}) == [3, 4]
    assert made.pop(2) == [1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_that_of_the_last_use_whatever_happens(seed: int, clock: Clock) -> None:
    """The oracle sorts all pages by the time until which they count as used."""
    draw = random.Random(seed)
    made = IdlePages(1000, clock)
    used: dict[int, tuple[float, int]] = {}
    for number in range(600):
        clock.now += draw.random()
        page = draw.randrange(30)
        match draw.choice(("use", "use", "wake", "evict")):
            case "use":
                until = clock.now + draw.randrange(20) if draw.random() < 0.5 else 0.0
                made.discard(page)
                made.add(page, until)
                used[page] = (max(until, clock.now), number)
            case "wake":
                made.discard(page)
                used.pop(page, None)
            case "evict":
                count = draw.randrange(min(len(used), 3) + 1)
                wanted = sorted(used, key=used.__getitem__)[:count]
                assert made.pop(count) == wanted
                for each in wanted:
                    del used[each]
        assert sorted(made) == sorted(used)
        assert len(made._ends) <= 2 * len(used) + 65, "outdated entries are dropped"

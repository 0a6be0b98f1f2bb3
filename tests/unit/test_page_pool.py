from __future__ import annotations

import random

import pytest

from baton.core.errors import Exhausted, Internal
from baton.engine.free_pages import merge_runs
from baton.engine.page_pool import Lease, PagePool


def test_pages_come_as_neighbours_when_there_are_any() -> None:
    pool = PagePool(32, page_size=16)
    pool.acquire(3)
    assert pool.acquire(5).pages == [3, 4, 5, 6, 7]


def test_a_hole_that_is_too_small_is_passed_over() -> None:
    pool = PagePool(10, page_size=16)
    first, _ = pool.acquire(2), pool.acquire(2)
    first.release()
    assert pool.acquire(3).pages == [4, 5, 6]


def test_scattered_pages_are_used_when_no_run_is_long_enough() -> None:
    pool = PagePool(6, page_size=16)
    leases = [pool.acquire(1) for _ in range(6)]
    for lease in leases[::2]:
        lease.release()
    assert sorted(pool.acquire(3).pages) == [0, 2, 4]


def test_a_second_release_raises() -> None:
    lease = PagePool(4, page_size=16).acquire(2)
    lease.release()
    with pytest.raises(Internal):
        lease.release()


def test_a_released_lease_cannot_grow() -> None:
    lease = PagePool(4, page_size=16).acquire(2)
    lease.release()
    with pytest.raises(Internal):
        lease.extend(1)


def test_too_much_raises_and_changes_nothing() -> None:
    pool = PagePool(4, page_size=16)
    lease = pool.acquire(3)
    with pytest.raises(Exhausted):
        lease.extend(2)
    assert (len(lease), pool.free, pool.check_integrity()) == (3, 1, "")


def test_a_with_block_gives_the_pages_back() -> None:
    pool = PagePool(4, page_size=16)
    with pool.acquire(4):
        assert pool.free == 0
    assert pool.free == 4


def test_a_page_held_twice_is_found() -> None:
    pool = PagePool(4, page_size=16)
    lease = pool.acquire(2)
    lease.pages.append(3)
    assert "held twice" in pool.check_integrity()


def test_a_lost_page_is_found() -> None:
    pool = PagePool(4, page_size=16)
    pool.acquire(2).pages.pop()
    assert "lost" in pool.check_integrity()


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_tokens_fill_pages(tokens: int, pages: int) -> None:
    assert PagePool(4, page_size=16).pages_for(tokens) == pages


@pytest.mark.parametrize("seed", range(5))
def test_a_random_life_keeps_every_page(seed: int) -> None:
    draw = random.Random(seed)
    pool = PagePool(64, page_size=16)
    leases: list[Lease] = []
    for _ in range(2000):
        if draw.random() < 0.5 and pool.free:
            leases.append(pool.acquire(draw.randint(0, min(8, pool.free))))
        elif leases and draw.random() < 0.3 and pool.free:
            draw.choice(leases).extend(1)
        elif leases:
            leases.pop(draw.randrange(len(leases))).release()
        assert pool.check_integrity() == ""
        assert pool.leased == sum(map(len, leases))
    for lease in leases:
        lease.release()
    assert pool.acquire(64).pages == list(range(64))


def test_runs_keep_their_order() -> None:
    assert merge_runs([4, 5, 6, 1, 2, 9]) == [(4, 7), (1, 3), (9, 10)]


def test_pages_released_under_a_step_come_back_when_it_ends() -> None:
    pool = PagePool(4, page_size=16)
    lease = pool.acquire(3)
    lease.pin()
    lease.pin()
    lease.release()
    lease.unpin()
    assert pool.free == 1
    assert pool.check_integrity(held=3) == ""
    lease.unpin()
    assert pool.free == 4
    assert pool.check_integrity(held=0) == ""


def test_a_pinned_lease_is_still_released_only_once() -> None:
    lease = PagePool(4, page_size=16).acquire(1)
    lease.pin()
    lease.release()
    with pytest.raises(Internal, match="twice"):
        lease.release()


def test_a_step_that_ends_before_the_release_changes_nothing() -> None:
    pool = PagePool(4, page_size=16)
    lease = pool.acquire(1)
    lease.pin()
    lease.unpin()
    assert pool.free == 3
    lease.release()
    assert pool.free == 4

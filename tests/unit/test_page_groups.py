"""Pools of models whose layers differ in their windows."""

from __future__ import annotations

import random

import pytest

from baton.core.errors import Exhausted
from baton.core.page_keys import slice_key
from baton.core.page_reach import Window, cut_layers
from baton.engine.page_groups import GONE, GroupedLease, make_pool
from baton.engine.page_pool import Lease, PagePool

SIZE = 4


def pool(total: int = 100, windows: tuple[Window, ...] = (None, 9)) -> PagePool:
    made = make_pool(total, SIZE, windows)
    made.root = b"root"
    return made


def keys(tokens: int, made: PagePool, salt: str = "") -> list[bytes]:
    return made.chain(salt).keys(range(tokens), tokens)


def compute(made: PagePool, tokens: int, chunk: int = SIZE, salt: str = "") -> Lease:
    """A lease as it is when a sequence has been computed, chunk by chunk."""
    known = keys(tokens, made, salt)
    lease = made.acquire(made.pages_for(tokens), known)
    for start in range(lease.found * SIZE, tokens, chunk):
        end = min(tokens, start + chunk)
        lease.cover(made.pages_for(end))
        lease.name(known[: end // SIZE])
        lease.advance(end)
        assert made.check_integrity() == ""
    return lease


def gone(lease: Lease) -> list[int]:
    return [table.count(GONE) for table in lease.tables]


def test_layers_that_are_alike_have_a_plain_pool() -> None:
    assert type(make_pool(4, SIZE, [None])) is PagePool


def test_pages_out_of_reach_are_given_back_while_the_sequence_runs() -> None:
    made = pool()
    lease = compute(made, 40)
    # A query at position 40 sees tokens 32 to 40 of the layers with a window of 9.
    assert gone(lease) == [0, 8]
    assert (made.leased, len(lease.held)) == (12, 12)
    lease.release()
    assert (made.free, made.check_integrity(held=0)) == (100, "")


def test_a_long_context_of_five_local_layers_to_a_global_one_holds_a_fifth_of_the_pages() -> None:
    windows = [None if layer % 6 == 5 else 1024 for layer in range(48)]
    cut, tokens = cut_layers(windows), 128 * 1024
    made = make_pool(60_000, 16, cut.windows)
    lease = made.receive(tokens, ())
    alike = made.pages_for(tokens) * len(cut.windows)
    assert 0.16 < made.leased / alike < 0.2
    lease.release()
    computing = made.acquire(made.pages_for(tokens))
    for end in range(2048, tokens + 1, 2048):
        computing.cover(made.pages_for(end))
        assert made.leased / alike < 0.2
        computing.advance(end)


def test_what_is_given_back_stays_cached() -> None:
    made = pool()
    lease = compute(made, 40)
    assert made.find(keys(24, made)) == 6, "a shorter prompt finds its window too"
    lease.release()
    assert made.acquire(10, keys(38, made)).found == 9


def test_a_retained_prompt_outlasts_others_in_every_slice() -> None:
    made = pool(60)
    lease = compute(made, 40)
    lease.retain(keys(40, made), 3600)
    lease.release()
    for salt in ("x", "y", "z"):
        compute(made, 40, salt=salt).release()
    assert made.find(keys(40, made)) == 10
    assert [made.find(keys(40, made, salt)) for salt in ("x", "z")] == [0, 10]


def test_a_hit_needs_the_last_window_alone() -> None:
    made = pool()
    compute(made, 40).release()
    known = keys(40, made)
    forget(made, [slice_key(key, 1) for key in known[:8]])
    assert made.find(known) == 10
    assert made.find(known[:9]) == 0, "token 36 sees token 28"
    lease = made.acquire(12, known)
    assert (lease.found, gone(lease)) == (10, [0, 8])
    assert made.check_integrity() == ""


def test_a_hit_ends_before_a_page_that_is_missing() -> None:
    for number in (0, 1):
        made = pool()
        compute(made, 40).release()
        forget(made, [slice_key(keys(40, made)[5], number)])
        assert made.find(keys(28, made)) == 5
    assert made.find(keys(40, made)) == 10, "which no longer needs it in the layers with a window"


def test_a_prompt_that_arrives_needs_no_more_of_a_hit_than_its_end_sees() -> None:
    made = pool()
    compute(made, 24).release()
    forget(made, [slice_key(key, 1) for key in keys(24, made)])
    lease = made.receive(60, keys(59, made))
    assert (lease.found, gone(lease), lease.held_before) == (6, [0, 13], 6)


@pytest.mark.parametrize("windows", [(None, 9), (None, None, 6), (7,), (None, 1)])
@pytest.mark.parametrize("cached", [0, 4, 16])
def test_both_ends_of_a_transfer_list_the_same_pages(
    cached: int, windows: tuple[Window, ...]
) -> None:
    for tokens in (1, 5, 30, 41):
        here, there = pool(windows=windows), pool(windows=windows)
        compute(there, cached).release()
        sending = here.acquire(here.pages_for(tokens))
        pushed: list[int] = []
        for place in range(here.pages_for(tokens)):
            sending.cover(place + 1)
            pushed += sending.listed(place, place + 1, tokens)
            sending.advance(min(tokens, (place + 1) * SIZE))
        assert sending.held == pushed, "and the sender still holds all of them"
        receiving = there.receive(tokens, keys(tokens - 1, there))
        assert receiving.found == min(cached, tokens - 1) // SIZE or None not in windows
        assert len(receiving.fresh) == len(pushed) - receiving.held_before


def forget(made: PagePool, gone_keys: list[bytes]) -> None:
    for key in gone_keys:
        with made.hold([key]) as held:
            held.forget()


def test_what_a_failed_sequence_computed_is_forgotten_given_back_or_not() -> None:
    made = pool()
    lease = compute(made, 40)
    lease.forget()
    lease.release()
    assert (made.cached, made.find(keys(40, made))) == (0, 0)
    assert made.check_integrity(held=0) == ""


def test_the_longest_context_is_what_one_sequence_can_be_computed_to() -> None:
    for windows in ((None, 9), (None, None, 5), (None, 1)):
        for total in (6, 11, 30):
            made = pool(total, windows)
            tokens = made.longest_context(10_000)
            if tokens:
                compute(made, tokens).release()
            with pytest.raises(Exhausted):
                made.acquire(made.pages_for(tokens + 1))
    assert pool(6, (9,)).longest_context(10_000) == 10_000


def test_no_page_is_lost_whatever_sequences_do() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        made = pool(40, draw.choice([(None, 9), (None, None, 6), (7,), (None, 5, 2)]))
        leases: list[tuple[Lease, int]] = []
        for _ in range(40):
            act(made, leases, draw)
            held = {page for lease, _ in leases for page in lease.held}
            assert made.check_integrity(held=len(held)) == "", seed
        for lease, _ in leases:
            lease.release()
        assert made.check_integrity(held=0) == ""


def act(made: PagePool, leases: list[tuple[Lease, int]], draw: random.Random) -> None:
    if leases and draw.random() < 0.3:
        leases.pop(draw.randrange(len(leases)))[0].release()
        return
    tokens, salt = draw.randint(1, 40), draw.choice("ab")
    known = keys(tokens, made, salt)
    try:
        if draw.random() < 0.5:
            lease = made.receive(tokens, known[: (tokens - 1) // SIZE])
            lease.name(known)
            lease.share_copies()
        else:
            lease = made.acquire(made.pages_for(tokens), known[: (tokens - 1) // SIZE])
            leases.append((lease, tokens))
            lease.cover(made.pages_for(tokens))
            lease.name(known)
            lease.advance(tokens)
            return
    except Exhausted:
        return
    assert isinstance(lease, GroupedLease)
    leases.append((lease, tokens))

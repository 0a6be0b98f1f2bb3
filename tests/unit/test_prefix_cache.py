from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from baton.core.errors import Exhausted
from baton.core.page_keys import page_keys, salted_root
from baton.engine.page_pool import Lease, PagePool

PAGE = 4


def pool(pages: int = 8) -> PagePool:
    return PagePool(pages, PAGE, root=b"root")


def tokens(text: str) -> list[int]:
    """A page of tokens for each letter."""
    return [ord(letter) for letter in text for _ in range(PAGE)]


def keys(text: str, salt: str = "") -> list[bytes]:
    return page_keys(salted_root(b"root", salt), tokens(text), PAGE)


def filled(pool: PagePool, text: str) -> Lease:
    """A lease whose pages hold `text`, as far as it was found, and otherwise were computed."""
    lease = pool.acquire(len(text), keys(text))
    lease.name(keys(text))
    return lease


def cached(pool: PagePool, text: str) -> str:
    """How much of `text` is known."""
    return text[: len(pool.cache.find(keys(text)))]


def test_a_released_page_is_found_by_what_it_holds() -> None:
    made = pool()
    first = filled(made, "abc")
    pages = list(first.pages)
    first.release()
    assert (made.free, made.cached, made.leased) == (8, 3, 0)
    again = made.acquire(4, keys("abd"))
    assert again.found == 2
    assert again.pages[:2] == pages[:2]
    assert (made.free, made.cached, made.leased) == (4, 1, 4)
    assert made.check_integrity() == ""


def test_pages_are_shared_while_they_are_leased_and_come_back_with_the_last_lease() -> None:
    made = pool()
    first, second = filled(made, "ab"), filled(made, "abc")
    assert second.pages[:2] == first.pages
    assert made.leased == 3
    first.release()
    assert made.leased == 3
    second.release()
    assert (made.leased, made.cached) == (0, 3)


def test_a_page_without_a_name_is_free_when_it_is_released() -> None:
    made = pool()
    lease = made.acquire(3, keys("abc"))
    lease.name(keys("ab"))
    lease.release()
    assert (cached(made, "abc"), made.cached) == ("ab", 2)


def test_nothing_is_cached_without_a_root() -> None:
    made = PagePool(8, PAGE)
    chain = made.chain("")
    lease = made.acquire(2, chain.to_find(tokens("ab")))
    lease.name(chain.keys(tokens("ab"), 8))
    lease.release()
    assert (made.cached, len(made.cache.changes)) == (0, 0)


def test_salts_share_nothing() -> None:
    made = pool()
    filled(made, "ab").release()
    assert made.acquire(2, keys("ab", "tenant")).found == 0
    assert made.chain("tenant").to_find(tokens("abc")) == keys("ab", "tenant")


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    chain = pool().chain("")
    assert chain.to_find(tokens("abc")) == keys("ab")
    assert chain.to_find([*tokens("abc"), 1]) == keys("abc")


def test_a_chain_hashes_a_growing_history_as_if_it_came_at_once() -> None:
    chain, history = pool().chain(""), tokens("abcde")
    for length in range(len(history) + 1):
        assert chain.keys(history[:length], length) == keys("abcde")[: length // PAGE]


def test_what_follows_a_prefix_is_evicted_before_it() -> None:
    made = pool(6)
    filled(made, "abc").release()
    filled(made, "abd").release()
    lease = made.acquire(3)
    assert (cached(made, "abc"), cached(made, "abd")) == ("ab", "abd"), "the older leaf"
    lease.extend(1)
    assert cached(made, "abd") == "ab"
    lease.extend(1)
    assert cached(made, "abd") == "a"
    assert made.cache.evictions == 3


def test_a_retained_prefix_outlasts_what_was_used_after_it_but_is_not_held() -> None:
    made = pool(8)
    with filled(made, "abc") as lease:
        lease.retain(keys("ab"), 3600)
    filled(made, "wxyz").release()
    lease = made.acquire(6)
    assert (cached(made, "abc"), cached(made, "wxyz")) == ("ab", ""), "the leaf is not retained"
    lease.extend(1)
    assert cached(made, "ab") == "a", "the last page first"
    lease.extend(1)
    assert (made.cached, made.free, made.check_integrity()) == (0, 0, "")


def test_a_prefix_stays_retained_while_others_use_it() -> None:
    made = pool(8)
    with filled(made, "ab") as lease:
        lease.retain(keys("ab"), 3600)
        other = filled(made, "abc")
    other.release()
    filled(made, "xyz").release()
    made.acquire(6)
    assert (cached(made, "abc"), cached(made, "xyz")) == ("ab", "")


def test_half_of_the_pool_is_retained_at_most() -> None:
    made = pool(8)
    for text in ("abc", "uvw"):
        with filled(made, text) as lease:
            lease.retain(keys(text), 3600)
    filled(made, "x").release()
    made.acquire(3)
    assert (cached(made, "abc"), cached(made, "uvw"), cached(made, "x")) == ("a", "uvw", "x")


def test_what_a_forgotten_page_held_is_not_retained() -> None:
    made = pool(4)
    with filled(made, "ab") as lease:
        lease.retain(keys("ab"), 3600)
        lease.forget()
    filled(made, "xy").release()
    filled(made, "uv").release()
    made.acquire(1)
    assert (cached(made, "xy"), cached(made, "uv"), made.check_integrity()) == ("x", "uv", "")


def test_what_was_used_last_is_evicted_last() -> None:
    made = pool(4)
    filled(made, "ab").release()
    filled(made, "xy").release()
    filled(made, "ab").release()
    made.acquire(2)
    assert (cached(made, "ab"), cached(made, "xy")) == ("ab", "")


def test_what_is_leased_or_pinned_is_never_evicted() -> None:
    made = pool(4)
    leased, pinned = filled(made, "ab"), filled(made, "xy")
    pinned.pin()
    pinned.release()
    with pytest.raises(Exhausted):
        made.acquire(1)
    assert (cached(made, "ab"), cached(made, "xy")) == ("ab", "xy")
    pinned.unpin()
    leased.extend(2)
    assert (cached(made, "ab"), cached(made, "xy")) == ("ab", "")


def test_pages_that_are_found_do_not_make_room_for_themselves() -> None:
    made = pool(4)
    filled(made, "abc").release()
    assert made.cost(5, keys("abc")) == 5
    with pytest.raises(Exhausted):
        made.acquire(5, keys("abc"))
    assert (cached(made, "abc"), made.free, made.check_integrity()) == ("abc", 4, "")
    shared = made.acquire(3, keys("abc"))
    assert made.cost(4, keys("abc")) == 1
    assert made.acquire(4, keys("abc")).pages[:3] == shared.pages


def test_a_copy_is_freed_and_counts_as_use_of_the_page_that_is_known() -> None:
    made = pool(6)
    one, other = made.acquire(2, keys("ab")), made.acquire(2, keys("ab"))
    one.name(keys("ab"))
    other.name(keys("ab"))
    one.release()
    filled(made, "xy").release()
    other.release()
    assert (made.cached, made.check_integrity()) == (4, "")
    made.acquire(4)
    assert (cached(made, "ab"), cached(made, "xy")) == ("ab", "")


def test_a_copy_takes_the_place_of_a_page_that_was_evicted_meanwhile() -> None:
    made = pool(4)
    one, other = made.acquire(2, keys("ab")), made.acquire(2, keys("ab"))
    one.name(keys("ab"))
    other.name(keys("ab"))
    one.release()
    made.acquire(2).release()
    assert cached(made, "ab") == ""
    other.release()
    assert cached(made, "ab") == "ab"


def test_a_copy_that_no_step_has_seen_is_given_up_for_the_page_that_is_known() -> None:
    made = pool(6)
    one = filled(made, "ab")
    other = made.acquire(3)
    other.name(keys("ab"))
    other.share_copies()
    assert other.pages[:2] == one.pages
    assert (made.leased, made.check_integrity()) == (3, "")
    one.release()
    other.release()
    assert (made.cached, made.check_integrity()) == (2, "")


def test_contents_that_may_be_wrong_are_forgotten_by_whomever_they_were_written() -> None:
    made = pool()
    first, second = filled(made, "ab"), filled(made, "abc")
    second.forget()
    assert cached(made, "abc") == ""
    first.release()
    second.release()
    assert (made.cached, made.free, made.check_integrity()) == (0, 8, "")


def test_changes_say_what_came_and_went_and_nothing_that_did_both() -> None:
    made = pool(3)
    filled(made, "ab").release()
    assert list(made.cache.changes.drain()) == keys("ab")
    made.acquire(2).release()
    filled(made, "xy").release()
    filled(made, "uvw").release()
    assert made.cache.changes.drain().keys() == {*keys("uvw"), *keys("ab")}
    assert [key in made.cache for key in keys("uvw") + keys("ab")] == [True] * 3 + [False] * 2


def test_a_page_that_is_counted_wrong_is_found() -> None:
    made = pool()
    filled(made, "ab").release()
    made.cache._idle.pop(1)
    assert "lost" in made.check_integrity()


@dataclass(eq=False)
class Holder:
    """A lease as its owner sees it: it writes page after page, and names what it wrote."""

    text: str
    lease: Lease
    written: int
    pinned: bool = False


class Model:
    """Every page as a plain string, and every promise checked where it is made use of."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.pool = pool(self.draw.choice((6, 12, 40)))
        self.memory = [""] * self.pool.total
        self.holders: list[Holder] = []
        self.told: set[bytes] = set()

    def run(self, steps: int) -> None:
        acts = [self.start, self.start, self.write, self.write, self.write, self.grow]
        acts += [self.end, self.pin, self.unpin, self.publish, self.fail]
        for _ in range(steps):
            act = self.draw.choice(acts)
            if act == self.start or self.holders:
                act()
            self.check()
        for holder in list(self.holders):
            self.stop(holder)
        assert self.pool.check_integrity(held=0) == ""
        assert self.pool.free == self.pool.total

    def start(self) -> None:
        text = "".join(self.draw.choices("ab", k=self.draw.randint(1, 6)))
        wanted = keys(text)[:-1]
        if self.pool.cost(len(text), wanted) > self.pool.free:
            with pytest.raises(Exhausted):
                self.pool.acquire(len(text), wanted)
            return
        lease = self.pool.acquire(len(text), wanted)
        assert [self.memory[page] for page in lease.pages[: lease.found]] == [
            text[: place + 1] for place in range(lease.found)
        ]
        self.holders.append(Holder(text, lease, lease.found))

    def write(self) -> None:
        """The next page, and sometimes its name."""
        holder = self.draw.choice(self.holders)
        if holder.written < len(holder.lease):
            page = holder.lease.pages[holder.written]
            assert page not in self.pool.cache.known_pages, "a known page is written"
            assert sum(page in other.lease.pages for other in self.holders) == 1
            holder.written += 1
            self.memory[page] = holder.text[: holder.written]
        if self.draw.random() < 0.7:
            holder.lease.name(keys(holder.text[: holder.written]))

    def grow(self) -> None:
        holder = self.draw.choice(self.holders)
        if self.pool.free and not holder.lease.released:
            holder.text += self.draw.choice("ab")
            holder.lease.extend(1)

    def pin(self) -> None:
        holder = self.draw.choice(self.holders)
        if not holder.pinned:
            holder.pinned = True
            holder.lease.pin()

    def unpin(self) -> None:
        holder = self.draw.choice(self.holders)
        if holder.pinned:
            self.stop_pin(holder)

    def stop_pin(self, holder: Holder) -> None:
        holder.pinned = False
        holder.lease.unpin()
        if holder.lease.released:
            self.holders.remove(holder)

    def end(self) -> None:
        holder = self.draw.choice(self.holders)
        if not holder.lease.released:
            holder.lease.release()
            if not holder.pinned:
                self.holders.remove(holder)

    def stop(self, holder: Holder) -> None:
        if not holder.lease.released:
            holder.lease.release()
        if holder.pinned:
            self.stop_pin(holder)
        else:
            self.holders.remove(holder)

    def fail(self) -> None:
        if self.draw.random() < 0.1:
            self.draw.choice(self.holders).lease.forget()

    def publish(self) -> None:
        changes = self.pool.cache.changes.drain()
        self.told ^= changes.keys()
        assert self.told == set(self.pool.cache.keys)

    def check(self) -> None:
        assert self.pool.check_integrity() == ""
        held = {page for holder in self.holders for page in holder.lease.pages}
        assert self.pool.leased == len(held)
        for key in self.pool.cache.keys:
            (page,) = self.pool.cache.find([key])
            assert keys(self.memory[page])[-1] == key, "a known page holds something else"


@pytest.mark.parametrize("seed", range(12))
def test_a_random_life_shares_only_what_is_true(seed: int) -> None:
    Model(seed).run(1500)


@pytest.mark.parametrize("seed", range(4))
def test_without_copies_no_page_outlives_the_one_before_it(seed: int) -> None:
    parents = dict(pair for text in words(6) for pair in itertools.pairwise(keys(text)[::-1]))
    draw, made = random.Random(seed), pool(12)
    leases: list[Lease] = []
    for _ in range(1000):
        text = "".join(draw.choices("ab", k=draw.randint(1, 6)))
        if made.cost(len(text), keys(text)) <= made.free and draw.random() < 0.6:
            leases.append(filled(made, text))
            leases[-1].share_copies()
        elif leases:
            leases.pop(draw.randrange(len(leases))).release()
        known = set(made.cache.keys)
        assert all(parents[key] in known for key in known if key in parents)


def words(length: int) -> list[str]:
    return ["".join(letters) for letters in itertools.product("ab", repeat=length)]

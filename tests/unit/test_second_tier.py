from __future__ import annotations

import random
from pathlib import Path

import pytest
from second_tiers import PAGE, TieredPool, keys

from baton.core.errors import Internal
from baton.engine import second_tier
from baton.engine.page_pool import Lease
from baton.engine.tier_copies import RestoreCosts, Tier


def full(rows: int = 8) -> TieredPool:
    """A pool of 8 pages, each of a prompt of its own."""
    made = TieredPool(pages=8, rows=rows)
    for letter in "abcdefgh":
        made.keep(letter)
    made.settle()
    return made


def test_a_quarter_of_a_full_pool_is_saved_the_next_to_go_first() -> None:
    made = TieredPool(pages=8)
    made.keep("abcdefgh")
    made.settle()
    assert [key in made.tier for key in keys("abcdefgh")] == [False] * 6 + [True] * 2
    made.fill_pool()
    assert made.pool.cache.lost == 6


def test_pages_that_were_evicted_come_back_as_they_were() -> None:
    made = full()
    made.keep("x")
    made.settle()
    made.keep("y")
    made.settle()
    assert [made.found(letter) for letter in "abc"] == ["a", "b", "c"]
    assert made.tier.counts[Tier.HOST].restored == 3
    assert made.pool.check_integrity(held=0) == ""


def test_nothing_is_copied_while_there_are_empty_pages() -> None:
    made = TieredPool(pages=8)
    made.keep("abcdef")
    made.settle()
    assert len(made.tier) == 0


def test_a_page_that_is_wanted_before_it_is_saved_is_lost_and_nobody_waits() -> None:
    made = TieredPool(pages=8)
    made.keep("abcdefgh")
    made.pool.second_tier.advance()
    assert made.backgrounds["save-pages"].tasks, "a copy has begun, and not ended"
    assert made.pool.free == 7
    with made.pool.acquire(7):
        assert made.pool.check_integrity(held=7) == ""
    made.settle()
    assert made.pool.cache.lost == 7
    assert made.tier.counts[Tier.HOST].dropped == 7
    assert (made.pool.free, made.pool.check_integrity(held=0)) == (8, "")


def test_half_of_what_is_free_can_be_had_while_pages_are_copied() -> None:
    made = TieredPool(pages=80, rows=80)
    made.keep("abcdefgh")
    with made.pool.acquire(72):
        made.pool.second_tier.advance()
        assert (made.pool.free, made.pool.leased) == (4, 76)
        with made.pool.acquire(4):
            made.settle()
    assert made.pool.check_integrity(held=0) == ""


def test_pages_that_are_being_saved_count_as_returning() -> None:
    made = TieredPool(pages=8)
    made.keep("abcdefgh")
    assert not made.pool.returning
    made.pool.second_tier.advance()
    assert made.pool.returning
    made.settle()
    assert not made.pool.returning


def test_a_prompt_waits_for_its_pages_and_then_finds_them() -> None:
    made = full()
    made.keep("x")
    made.settle()
    assert made.pool.second_tier.restore_pages(keys("a")) == 1
    assert made.pool.second_tier.is_restoring(keys("a")[0])
    assert made.pool.second_tier.restore_pages(keys("a")) == 0, "it is under way"
    made.settle()
    assert not made.pool.second_tier.is_restoring(keys("a")[0])
    with made.compute("a") as lease:
        assert lease.found == 1


def test_the_prefix_that_a_restoration_follows_stays_in_the_pool(tmp_path: Path) -> None:
    made = TieredPool(pages=8, folder=tmp_path)
    made.keep("abcdef")
    made.settle()
    made.keep("uvwxy")
    made.settle()
    held = len(made.pool.cache.find(keys("abcdef")))
    assert 0 < held < 6
    assert made.pool.second_tier.restore_pages(keys("abcdef")) == 6 - held
    with made.pool.acquire(2):  # would evict the prefix, which has been idle for the longest
        made.settle()
        assert made.found("abcdef") == "abcdef"


def test_what_a_failed_step_has_read_is_not_brought_back(tmp_path: Path) -> None:
    made = TieredPool(folder=tmp_path)
    made.keep("ab")
    made.settle()
    assert len(made.tier) == 2
    lease = made.compute("ab")
    lease.forget()
    lease.release()
    made.settle()
    assert (len(made.tier), made.found("ab")) == (0, "")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_is_forgotten_while_it_is_saved_is_not_kept(tmp_path: Path) -> None:
    made = TieredPool(folder=tmp_path)
    made.keep("ab")
    made.pool.second_tier.advance()
    with made.compute("ab") as lease:
        lease.forget()
    made.settle()
    assert len(made.tier) == 0
    assert made.pool.check_integrity(held=0) == ""


def test_a_restorer_that_stands_still_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = full()
    made.keep("xy")
    assert made.pool.second_tier.restore_pages(keys("a")) == 1
    with monkeypatch.context() as patch:
        patch.setattr(second_tier, "STALL_SECONDS", 0.0)
        made.pool.second_tier.advance()
    assert not made.pool.second_tier.is_restoring(keys("a")[0])
    assert made.pool.check_integrity(held=0) == ""
    before = made.kv.clone()
    assert made.pool.second_tier.restore_pages(keys("a")) == 0, "its thread may still stand still"
    made.backgrounds["restore-pages"].run()
    assert made.kv.equal(before), "no page is written once it was given up"
    made.settle()
    assert made.found("a") == "a"


def test_a_thread_that_fails_is_not_overlooked() -> None:
    made = TieredPool(pages=8)
    made.tier._post_crash(OSError("gone"))
    with pytest.raises(Internal, match="gone"):
        made.pool.second_tier.advance()


def test_pages_are_computed_where_that_takes_less_and_now_and_then_tried_again() -> None:
    costs = RestoreCosts(PAGE)
    page = [Tier.HOST]
    assert costs.pays(page, [], 1), "nothing was measured"
    costs.copies[Tier.HOST].add(10, 1.0)
    assert costs.pays(page, [], 1), "nothing to compare with"
    costs.compute.add(10 * PAGE, 1.1)
    assert costs.pays(page, [], 1)
    assert not costs.pays(page, page, 1), "another one is before it"
    costs.compute.add(1000 * PAGE, 90.0)
    assert not costs.pays(page, [], 1)
    assert any(costs.pays(page, [], 1) for _ in range(20))


def test_what_takes_longer_than_compute_is_computed() -> None:
    made = full()
    made.keep("xy")
    made.tier.costs.copies[Tier.HOST].add(1, 1.0)
    made.tier.costs.compute.add(PAGE, 0.1)
    assert made.pool.second_tier.restore_pages(keys("a")) == 0
    assert made.tier.counts[Tier.HOST].hits == 1


def test_what_changed_is_told_once_and_with_its_last_state() -> None:
    made = full(rows=2)
    told = made.tier.changes.drain().keys()
    assert len(told) == len(made.tier) == len(made.pool.second_tier)
    made.keep("vwxyz")
    made.settle()
    assert told ^ made.tier.changes.drain().keys() == set(made.tier.keys)


@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_when_no_page_is_lost_and_none_holds_anything_else(
    seed: int, files: bool, tmp_path: Path
) -> None:
    """Prompts that begin alike come, grow, fail and go while copies run at any time."""
    draw = random.Random(seed)
    pages, rows = draw.randrange(6, 24), draw.randrange(4, 16)
    folder = tmp_path if files else None
    made = TieredPool(pages, rows, folder, files=draw.randrange(1, 40))
    leases: list[Lease] = []
    for _ in range(400):
        _do_something(draw, made, leases)
        assert made.pool.check_integrity() == ""
    for lease in leases:
        lease.release()
    made.settle()
    assert made.pool.check_integrity(held=0) == ""
    assert made.tier.counts[Tier.HOST].restored + made.tier.counts[Tier.FILES].restored


def _do_something(draw: random.Random, made: TieredPool, leases: list[Lease]) -> None:
    text = "".join(draw.choices("ab", k=draw.randrange(1, 7)))
    match draw.choice(["prompt", "prompt", "release", "release", "copy", "copy", "step", "fail"]):
        case "prompt" if made.pool.cost(len(text), keys(text)) <= made.pool.free:
            if not made.pool.second_tier.restore_pages(keys(text)):
                leases.append(made.compute(text))
        case "release" if leases:
            leases.pop(draw.randrange(len(leases))).release()
        case "copy":
            draw.choice(list(made.backgrounds.values())).run(draw.randrange(1, 4))
        case "step":
            made.pool.second_tier.advance()
        case "fail" if leases and draw.random() < 0.2:
            leases[-1].forget()

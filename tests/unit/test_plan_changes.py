from __future__ import annotations

from baton.planner.sizing import Pools
from bench.plan_changes import Change, agreement

SWITCH = "switch 1 from decode to prefill"


def change(seconds: float, words: str) -> Change:
    return Change(seconds, words, Pools(1, 2))


def test_changes_agree_that_are_the_same_in_the_same_order() -> None:
    live = [change(4.0, f"{SWITCH}, 2 more needed than allowed"), change(20.0, "drain 1 prefill")]
    simulated = [change(5.5, SWITCH), change(20.5, "drain 1 prefill")]
    expected = "the same changes in the same order: 2, at most 1.5 s apart"
    assert agreement(live, simulated) == expected


def test_what_could_not_be_changed_does_not_count() -> None:
    live = [change(4.0, "1 more needed than allowed"), change(8.0, "no change")]
    assert "nothing" in agreement(live, [])


def test_changes_in_another_order_do_not_agree() -> None:
    one, other = change(4.0, SWITCH), change(9.0, "drain 1 prefill")
    assert "NOT" in agreement([one, other], [other, one])
    assert "NOT" in agreement([one], [])

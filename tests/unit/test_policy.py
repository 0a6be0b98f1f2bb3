from __future__ import annotations

import pytest

from core.errors import LayoutMismatch, Unavailable
from router.policy import DecodeView, Placement, PrefillView, Snapshot, least_loaded

BOTH = frozenset({"d0", "d1"})


def prefill(name: str, pending: int = 0, reaches: frozenset[str] = BOTH) -> PrefillView:
    return PrefillView(name, pending, reaches)


def decode(name: str, requests: int = 0, free: int = 10) -> DecodeView:
    return DecodeView(name, requests, free)


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        (Snapshot([prefill("p0")], [decode("d0")]), Placement("p0", "d0")),
        (Snapshot([prefill("p0", 9), prefill("p1", 3)], [decode("d0")]), Placement("p1", "d0")),
        (Snapshot([prefill("p0")], [decode("d0", 4), decode("d1", 2)]), Placement("p0", "d1")),
        (
            Snapshot([prefill("p0")], [decode("d0", 1, 3), decode("d1", 1, 8)]),
            Placement("p0", "d1"),
        ),
        (
            Snapshot([prefill("p1"), prefill("p0")], [decode("d1"), decode("d0")]),
            Placement("p0", "d0"),
        ),
        (
            Snapshot([prefill("p0", 0, frozenset({"d1"}))], [decode("d0"), decode("d1", 7)]),
            Placement("p0", "d1"),
        ),
        (
            Snapshot([prefill("p0", 0, frozenset()), prefill("p1", 5)], [decode("d0")]),
            Placement("p1", "d0"),
        ),
    ],
)
def test_the_least_loaded_pair_that_is_connected_is_chosen(
    snapshot: Snapshot, expected: Placement
) -> None:
    assert least_loaded(snapshot) == expected


@pytest.mark.parametrize(
    ("snapshot", "error", "words"),
    [
        (Snapshot(), Unavailable, "no prefill worker"),
        (Snapshot(prefill=[prefill("p0")]), Unavailable, "no decode worker"),
        (Snapshot([prefill("p0", 0, frozenset())], [decode("d0")]), Unavailable, "connected"),
        (
            Snapshot([prefill("p0", 0, frozenset())], [decode("d0")], ["page_size 16 and 32"]),
            LayoutMismatch,
            "page_size 16 and 32",
        ),
    ],
)
def test_no_pair_says_why(snapshot: Snapshot, error: type[Unavailable], words: str) -> None:
    with pytest.raises(error, match=words):
        least_loaded(snapshot)

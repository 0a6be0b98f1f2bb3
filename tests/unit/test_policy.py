from __future__ import annotations

import pytest

from core.errors import BatonError, Exhausted, LayoutMismatch, Unavailable
from router.policy import DecodeView, Placement, Policy, PrefillView, Snapshot, choose

BOTH = frozenset({"d0", "d1"})
MISSING = "no prefill worker is ready"


def prefill(
    name: str, pending: int = 0, reaches: frozenset[str] = BOTH, room: bool = True
) -> PrefillView:
    return PrefillView(name, pending, reaches, room)


def decode(name: str, requests: int = 0, free: int = 10, room: bool = True) -> DecodeView:
    return DecodeView(name, requests, free, room)


def local(name: str, reason: str = MISSING) -> Placement:
    return Placement("", name, Policy.LOCAL, reason)


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
        (
            Snapshot([prefill("p0")], [decode("d0", room=False), decode("d1", 9)]),
            Placement("p0", "d1"),
        ),
    ],
)
def test_the_least_loaded_pair_that_is_connected_and_has_room_is_chosen(
    snapshot: Snapshot, expected: Placement
) -> None:
    assert choose(snapshot) == expected


@pytest.mark.parametrize(
    ("snapshot", "error", "words"),
    [
        (Snapshot(), Unavailable, "no prefill worker"),
        (Snapshot(decode=[decode("d0")]), Unavailable, "no prefill worker"),
        (Snapshot(prefill=[prefill("p0")]), Unavailable, "no decode worker"),
        (Snapshot(prefill=[prefill("p0")], local_prefill=True), Unavailable, "no decode worker"),
        (Snapshot([prefill("p0", 0, frozenset())], [decode("d0")]), Unavailable, "connected"),
        (
            Snapshot([prefill("p0", 0, frozenset())], [decode("d0")], ["page_size 16 and 32"]),
            LayoutMismatch,
            "page_size 16 and 32",
        ),
        (Snapshot([prefill("p0")], [decode("d0", room=False)]), Exhausted, "decode worker is full"),
        (
            Snapshot([], [decode("d0", room=False)], local_prefill=True),
            Exhausted,
            "decode worker is full",
        ),
    ],
)
def test_no_placement_says_why(snapshot: Snapshot, error: type[BatonError], words: str) -> None:
    found = choose(snapshot)
    assert type(found) is error
    assert words in str(found)


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        (Snapshot([], [decode("d0", 3), decode("d1", 2)], local_prefill=True), local("d1")),
        (Snapshot([], [decode("d0"), decode("d1", 2)], local_prefill=True), local("d0")),
        (
            Snapshot([prefill("p0", 0, frozenset())], [decode("d0")], local_prefill=True),
            local("d0", "no prefill worker is connected to a decode worker yet"),
        ),
    ],
)
def test_decode_workers_read_prompts_when_no_prefill_worker_can(
    snapshot: Snapshot, expected: Placement
) -> None:
    assert choose(snapshot) == expected


def test_pools_that_do_not_fit_are_not_hidden_by_local_prefill() -> None:
    snapshot = Snapshot([prefill("p0", 0, frozenset())], [decode("d0")], ["differ"], True)
    assert isinstance(choose(snapshot), LayoutMismatch)


def test_prefill_that_is_merely_busy_is_waited_for() -> None:
    snapshot = Snapshot([prefill("p0", 9000)], [decode("d0")], local_prefill=True)
    assert choose(snapshot) == Placement("p0", "d0")


@pytest.mark.parametrize(
    ("snapshot", "prefill_worker", "decode_worker"),
    [
        (Snapshot([prefill("p0", 5), prefill("p1", 4)]), "p1", ""),
        (Snapshot([prefill("p0", 5), prefill("p1", 4, room=False)], [decode("d0")]), "p0", ""),
        (Snapshot([], [decode("d0")], local_prefill=True), "", "d0"),
    ],
)
def test_one_token_needs_no_decode_worker(
    snapshot: Snapshot, prefill_worker: str, decode_worker: str
) -> None:
    found = choose(snapshot, one_token=True)
    assert isinstance(found, Placement)
    assert (found.prefill, found.decode) == (prefill_worker, decode_worker)

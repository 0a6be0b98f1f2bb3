from __future__ import annotations

import random

import pytest

from baton.v1.transfer_pb2 import Landed
from core.errors import DeadlineExceeded, Internal, Unavailable, WorkerLost
from kv_transfer.receiver import Action, Fail, Free, HandOver, Receiver, State

LANDED = Landed(first_token=7, pages=4)
MISFIT = Landed(first_token=7, pages=3)


def reserved() -> Receiver:
    """Four pages, a ticket that expires at 10, and a grace until 15."""
    return Receiver(4, expires_at=10.0, grace_seconds=5.0)


def quarantined() -> Receiver:
    receiver = reserved()
    assert receiver.release(undelivered=False) == []
    return receiver


def kinds(actions: list[Action]) -> list[type]:
    return [type(action) for action in actions]


def test_landed_pages_are_handed_over_with_the_first_token() -> None:
    receiver = reserved()
    assert receiver.landed(LANDED) == [HandOver(7)]
    assert receiver.over


def test_a_wrong_number_of_pages_fails_and_frees() -> None:
    fail, free = reserved().landed(MISFIT)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, Internal)
    assert "3 pages landed where 4 were reserved" in fail.error.message
    assert free == Free()


@pytest.mark.parametrize(
    ("event", "error"), [("drained", Unavailable), ("sender_died", WorkerLost)]
)
def test_a_sender_that_gave_up_or_died_fails_and_frees(event: str, error: type[Exception]) -> None:
    fail, free = getattr(reserved(), event)()
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, error)
    assert free == Free()


def test_an_undelivered_reservation_is_freed_at_once() -> None:
    assert reserved().release(undelivered=True) == [Free()]
    assert quarantined().release(undelivered=True) == [Free()]


def test_a_released_reservation_is_quarantined_through_expiry_until_the_grace_is_over() -> None:
    receiver = quarantined()
    assert receiver.release(undelivered=False) == []
    assert receiver.deadline == 15.0
    assert receiver.tick(now=14.9) == []
    assert receiver.tick(now=15.0) == [Free()]


def test_an_expired_reservation_fails_at_once_and_is_freed_after_the_grace() -> None:
    receiver = reserved()
    assert receiver.deadline == 10.0
    assert receiver.tick(now=9.9) == []
    (fail,) = receiver.tick(now=10.0)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, DeadlineExceeded)
    assert receiver.state is State.QUARANTINED
    assert receiver.tick(now=15.0) == [Free()]


@pytest.mark.parametrize("note", [LANDED, MISFIT])
def test_pages_that_land_in_quarantine_are_freed_and_not_handed_over(note: Landed) -> None:
    assert quarantined().landed(note) == [Free()]


@pytest.mark.parametrize("event", ["drained", "sender_died"])
def test_quarantine_ends_when_the_sender_is_done(event: str) -> None:
    assert getattr(quarantined(), event)() == [Free()]


@pytest.mark.parametrize("event", ["drained", "sender_died"])
def test_nothing_matters_once_the_pages_are_handed_over(event: str) -> None:
    receiver = reserved()
    receiver.landed(LANDED)
    assert getattr(receiver, event)() == []
    assert receiver.landed(LANDED) == []
    assert receiver.release(undelivered=False) == []
    assert receiver.tick(now=99.0) == []


def test_random_lives_free_quarantined_pages_only_for_an_allowed_reason() -> None:
    ends: set[tuple[State, str]] = set()
    for seed in range(3000):
        draw = random.Random(seed)
        receiver, now, seen = reserved(), 0.0, list[type]()
        while not receiver.over:
            before, now = receiver.state, now + draw.random() * 3
            inputs = {
                "landed": lambda r=receiver: r.landed(LANDED),
                "misfit": lambda r=receiver: r.landed(MISFIT),
                "drained": receiver.drained,
                "sender_died": receiver.sender_died,
                "released": lambda r=receiver: r.release(undelivered=False),
                "undelivered": lambda r=receiver: r.release(undelivered=True),
            }
            ticks = {"tick": lambda r=receiver, at=now: r.tick(at)}
            name, act = draw.choice(list(inputs.items()) + list(ticks.items()) * 8)
            actions = act()
            seen += kinds(actions)
            if Free() in actions:
                assert name not in ("released", "tick") or now >= 15.0
            if receiver.over:
                ends.add((before, name))
        assert seen.count(HandOver) + seen.count(Free) == 1
        assert seen.count(Fail) <= 1
        assert not {HandOver, Fail} <= set(seen)
    assert {name for state, name in ends if state is State.QUARANTINED} == {
        "landed",
        "misfit",
        "drained",
        "sender_died",
        "undelivered",
        "tick",
    }

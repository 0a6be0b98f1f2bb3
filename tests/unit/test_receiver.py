from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from baton.core.errors import DeadlineExceeded, Internal, Unavailable, WorkerLost
from baton.core.types import AttemptKey
from baton.kv_transfer.receiver import MAX_ROUNDS, Receiver, ReceiverAction, ReceiverState
from baton.kv_transfer.transfer_events import (
    Arrived,
    Fetched,
    ReservationFailed,
    ReservationFreed,
    ReservationOverdue,
)
from baton.kv_transfer.transfer_protocol import (
    SendNote,
    accepted_note,
    pack_note,
    revoked_note,
)
from baton.v1.transfer_pb2 import Arrived as ArrivedNote
from baton.v1.transfer_pb2 import Renewed, Resend, TransferNote

KEY = AttemptKey("request", 2)
ARRIVED = ArrivedNote(first_token=7, pages=4)
MISFIT = ArrivedNote(first_token=7, pages=3)
ACCEPTED = SendNote(accepted_note(KEY))
REVOKED = SendNote(revoked_note(KEY))


def resend(positions: list[int], round: int) -> SendNote:
    resend = Resend(positions=positions, round=round)
    return SendNote(pack_note(KEY, TransferNote(resend=resend)))


def reserved() -> Receiver:
    """Four pages, a ticket that expires at 100, and leases of 10 seconds."""
    return Receiver(KEY, "sender", range(4), expires_at=100.0, lease_seconds=10.0)


def opened() -> Receiver:
    """A sender has asked for its lease at 0."""
    receiver = reserved()
    assert receiver.beat(1, now=0.0) == [
        SendNote(pack_note(KEY, TransferNote(renewed=Renewed(number=1))))
    ]
    return receiver


def quarantined() -> Receiver:
    receiver = opened()
    assert receiver.release(now=1.0) == [REVOKED]
    return receiver


def error_of(actions: list[ReceiverAction]) -> Exception:
    (fail,) = [action for action in actions if isinstance(action, ReservationFailed)]
    assert fail.error is not None
    return fail.error


def test_arrived_pages_are_reported_with_the_first_token_and_accepted() -> None:
    receiver = opened()
    assert receiver.arrived(ARRIVED, (), now=1.0) == [ACCEPTED, Arrived(KEY, 7)]
    assert receiver.over


def test_a_wrong_number_of_pages_fails_and_frees() -> None:
    actions = opened().arrived(MISFIT, (), now=1.0)
    assert "3 pages arrived where 4 were reserved" in str(error_of(actions))
    assert actions[-1] == ReservationFreed(KEY)


@pytest.mark.parametrize(("pages", "fits"), [(0, False), (1, True), (4, True), (5, False)])
def test_of_pages_that_are_fetched_some_may_be_missing_at_the_end(pages: int, fits: bool) -> None:
    receiver = Receiver(
        KEY, "sender", range(4), expires_at=100.0, lease_seconds=10.0, fetched_since=0.5
    )
    receiver.beat(1, now=0.0)
    actions = receiver.arrived(ArrivedNote(pages=pages), (), now=1.0)
    assert (actions == [ACCEPTED, Fetched(KEY, pages, 0.5)]) is fits
    assert receiver.state is (ReceiverState.ARRIVED if fits else ReceiverState.FREED)


def test_pages_that_arrive_without_a_lease_fail_and_free() -> None:
    assert isinstance(error_of(reserved().arrived(ARRIVED, (), now=1.0)), Internal)


@pytest.mark.parametrize("make", [reserved, opened])
def test_a_sender_that_died_fails_and_frees(make: Callable[[], Receiver]) -> None:
    fail, free = make().sender_died()
    assert isinstance(fail, ReservationFailed)
    assert isinstance(fail.error, WorkerLost)
    assert free == ReservationFreed(KEY)


@pytest.mark.parametrize("make", [reserved, opened])
def test_a_sender_that_gave_up_frees_and_says_itself_why(make: Callable[[], Receiver]) -> None:
    assert make().drained() == [ReservationFailed(KEY, None), ReservationFreed(KEY)]


def test_a_reservation_that_no_sender_asked_for_is_freed_at_once() -> None:
    assert reserved().release(now=1.0) == [ReservationFreed(KEY)]


def test_a_reservation_that_no_sender_asked_for_expires_and_is_freed() -> None:
    receiver = reserved()
    assert receiver.deadline == 100.0
    actions = receiver.tick(now=100.0)
    assert isinstance(error_of(actions), DeadlineExceeded)
    assert actions[-1] == ReservationFreed(KEY)


def test_a_silent_sender_fails_the_reservation_and_its_lease_is_revoked() -> None:
    receiver = opened()
    receiver.beat(2, now=5.0)
    assert receiver.deadline == 15.0
    actions = receiver.tick(now=15.0)
    assert isinstance(error_of(actions), Unavailable)
    assert actions[-1] == REVOKED
    assert receiver.state is ReceiverState.QUARANTINED


def test_a_sender_that_only_beats_does_not_outlast_its_ticket() -> None:
    receiver = opened()
    receiver.beat(2, now=99.0)
    assert isinstance(error_of(receiver.tick(now=100.0)), DeadlineExceeded)
    assert receiver.state is ReceiverState.QUARANTINED


def test_no_time_ends_a_quarantine_and_the_sender_is_told_again_and_again() -> None:
    receiver = quarantined()
    assert receiver.deadline == 3.0
    assert receiver.tick(now=3.0) == [ReservationOverdue(KEY), REVOKED]
    assert receiver.tick(now=1e9) == [REVOKED]
    assert receiver.release(now=1e9) == [REVOKED]
    assert receiver.state is ReceiverState.QUARANTINED


def test_a_beat_in_quarantine_is_answered_with_the_revocation() -> None:
    assert quarantined().beat(2, now=2.0) == [REVOKED]


@pytest.mark.parametrize("note", [ARRIVED, MISFIT])
def test_pages_that_arrive_in_quarantine_are_freed_and_not_reported(note: ArrivedNote) -> None:
    actions = quarantined().arrived(note, (), now=2.0)
    assert actions[-1] == ReservationFreed(KEY)
    assert not any(isinstance(action, Arrived | ReservationFailed) for action in actions)


@pytest.mark.parametrize("event", ["drained", "sender_died"])
def test_quarantine_ends_when_the_sender_is_done(event: str) -> None:
    assert getattr(quarantined(), event)() == [ReservationFreed(KEY)]


def test_damaged_pages_are_asked_for_again_and_then_handed_over() -> None:
    receiver = opened()
    assert receiver.arrived(ARRIVED, [1, 3], now=1.0) == [resend([1, 3], 1)]
    again = ArrivedNote(first_token=7, pages=4, round=1)
    assert receiver.arrived(again, (), now=2.0) == [ACCEPTED, Arrived(KEY, 7)]


def test_a_repeated_landed_of_an_earlier_round_only_repeats_the_order() -> None:
    receiver = opened()
    receiver.arrived(ARRIVED, [1], now=1.0)
    assert receiver.arrived(ARRIVED, (), now=2.0) == [resend([1], 1)]
    assert receiver.state is ReceiverState.OPEN


def test_pages_that_stay_damaged_fail_and_are_quarantined() -> None:
    receiver = opened()
    for round in range(MAX_ROUNDS):
        receiver.arrived(ArrivedNote(first_token=7, pages=4, round=round), [1], now=1.0)
    actions = receiver.arrived(ArrivedNote(first_token=7, pages=4, round=MAX_ROUNDS), [1], now=1.0)
    assert isinstance(error_of(actions), Unavailable)
    assert receiver.state is ReceiverState.QUARANTINED


def test_quarantine_outlasts_a_landed_that_another_write_was_ordered_after() -> None:
    receiver = opened()
    receiver.arrived(ARRIVED, [1], now=1.0)
    receiver.release(now=2.0)
    assert receiver.arrived(ARRIVED, (), now=3.0) == []
    assert receiver.state is ReceiverState.QUARANTINED


@pytest.mark.parametrize("event", ["drained", "sender_died"])
def test_nothing_matters_once_the_pages_are_handed_over(event: str) -> None:
    receiver = opened()
    receiver.arrived(ARRIVED, (), now=1.0)
    assert getattr(receiver, event)() == []
    assert receiver.beat(2, now=1.0) == []
    assert receiver.arrived(ARRIVED, (), now=1.0) == []
    assert receiver.release(now=1.0) == []
    assert receiver.tick(now=999.0) == []


def test_random_lives_free_written_pages_only_for_an_allowed_reason() -> None:
    ends: set[tuple[ReceiverState, str]] = set()
    for seed in range(3000):
        draw = random.Random(seed)
        receiver, now, seen = reserved(), 0.0, list[type]()
        while not receiver.over:
            before, now = receiver.state, now + draw.random() * 8
            note = ArrivedNote(first_token=7, pages=4, round=receiver.round)
            inputs: dict[str, Callable[[], list[ReceiverAction]]] = {
                "beat": lambda r=receiver, at=now: r.beat(1, at),
                "arrived": lambda r=receiver, n=note, at=now: r.arrived(n, (), at),
                "damaged": lambda r=receiver, n=note, at=now: r.arrived(n, [2], at),
                "stale": lambda r=receiver, at=now: r.arrived(ArrivedNote(round=9), (), at),
                "drained": receiver.drained,
                "sender_died": receiver.sender_died,
                "released": lambda r=receiver, at=now: r.release(at),
            }
            ticks = {"tick": lambda r=receiver, at=now: r.tick(at)}
            name, act = draw.choice(list(inputs.items()) + list(ticks.items()) * 6)
            actions = act()
            seen += [type(action) for action in actions]
            if receiver.over:
                ends.add((before, name))
        assert seen.count(Arrived) + seen.count(ReservationFreed) == 1
        assert seen.count(ReservationFailed) <= 1
        assert not {Arrived, ReservationFailed} <= set(seen)
    assert {name for state, name in ends if state is ReceiverState.QUARANTINED} == {
        "arrived",
        "damaged",
        "drained",
        "sender_died",
    }
    assert {name for state, name in ends if state is ReceiverState.OPEN} == {
        "arrived",
        "drained",
        "sender_died",
    }

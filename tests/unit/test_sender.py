from __future__ import annotations

import random

import pytest

from baton.v1.transfer_pb2 import TicketBody
from core.errors import BatonError, Cancelled, DeadlineExceeded, Internal, WorkerLost
from core.types import AttemptKey
from kv_transfer.note import drained_note, landed_note
from kv_transfer.sender import Action, Ended, Sender, SendNote, StartWrite, State

KEY = AttemptKey("request", 2)
PAGE_BYTES = 100
REMOTE = [40, 41, 42, 43]
LANDED = landed_note(KEY, 7, 4)
DRAINED = drained_note(KEY)


def ticket(pages: list[int] = REMOTE, epoch: int = 2, expires: float = 10.0) -> TicketBody:
    return TicketBody(
        request_id="request",
        epoch=epoch,
        agent="peer",
        pages=pages,
        expires_after_seconds=expires,
    )


def write(local: list[int], remote: list[int], note: bytes = b"") -> StartWrite:
    return StartWrite("peer", tuple(local), tuple(remote), note)


def pushing() -> Sender:
    """A push with a ticket that was given at time 0 and expires at 10."""
    sender = Sender(KEY, "peer", PAGE_BYTES)
    assert sender.ticket(ticket(), now=0.0) == []
    return sender


def error_of(actions: list[Action]) -> BatonError:
    ended = actions[-1]
    assert isinstance(ended, Ended)
    assert ended.error is not None
    return ended.error


def test_pages_that_were_ready_before_the_ticket_go_out_as_one_write_with_the_note() -> None:
    sender = Sender(KEY, "peer", PAGE_BYTES)
    assert sender.pages_ready([1, 2], now=0.0) == []
    assert sender.finish(7, [3, 9], finished_at=1.0, now=1.0) == []
    actions = sender.ticket(ticket(), now=2.0)
    assert actions == [write([1, 2, 3, 9], REMOTE, LANDED)]
    assert sender.write_done(now=2.5) == [Ended(None, 400, 0.5, 1.5)]


def test_chunks_that_become_ready_during_a_write_go_out_as_one() -> None:
    sender = pushing()
    assert sender.pages_ready([1], now=1.0) == [write([1], [40])]
    assert sender.pages_ready([2], now=1.1) == []
    assert sender.pages_ready([3], now=1.2) == []
    assert sender.write_done(now=2.0) == [write([2, 3], [41, 42])]


def test_the_last_write_carries_the_note_and_starts_when_all_others_are_done() -> None:
    sender = pushing()
    sender.pages_ready([1, 2, 3], now=1.0)
    assert sender.finish(7, [4], finished_at=2.0, now=2.0) == []
    assert sender.write_done(now=3.0) == [write([4], [43], LANDED)]
    assert sender.write_done(now=4.0) == [Ended(None, 400, 3.0, 2.0)]


def test_a_first_token_that_comes_during_the_last_write_follows_it_alone() -> None:
    sender = pushing()
    sender.pages_ready([1, 2, 3, 4], now=1.0)
    assert sender.finish(7, [], finished_at=2.0, now=2.0) == []
    assert sender.write_done(now=3.0) == [write([], [], LANDED)]
    assert sender.write_done(now=3.0) == [Ended(None, 400, 2.0, 1.0)]


def test_a_push_that_is_cancelled_before_its_ticket_ends_at_once() -> None:
    sender = Sender(KEY, "peer", PAGE_BYTES)
    sender.pages_ready([1], now=0.0)
    actions = sender.cancel()
    assert actions[:-1] == [SendNote("peer", DRAINED)]
    assert isinstance(error_of(actions), Cancelled)
    assert sender.ticket(ticket(), now=1.0) == []


def test_a_cancelled_push_waits_for_its_write_and_then_says_drained() -> None:
    sender = pushing()
    sender.pages_ready([1], now=1.0)
    assert sender.cancel() == []
    assert sender.pages_ready([2], now=1.5) == []
    assert sender.finish(7, [3, 4], finished_at=1.6, now=1.6) == []
    actions = sender.write_done(now=2.0)
    assert actions[0] == SendNote("peer", DRAINED)
    assert isinstance(error_of(actions), Cancelled)


def test_a_push_that_is_cancelled_between_writes_says_drained_at_once() -> None:
    sender = pushing()
    sender.pages_ready([1], now=1.0)
    sender.write_done(now=2.0)
    assert sender.cancel()[0] == SendNote("peer", DRAINED)


def test_a_push_that_is_cancelled_while_landing_ends_cancelled() -> None:
    sender = pushing()
    sender.finish(7, [1, 2, 3, 4], finished_at=1.0, now=1.0)
    assert sender.state is State.LANDING
    assert sender.cancel() == []
    assert isinstance(error_of(sender.write_done(now=2.0)), Cancelled)


def test_a_failed_write_ends_the_push_with_its_error_and_says_drained() -> None:
    sender = pushing()
    sender.pages_ready([1], now=1.0)
    actions = sender.write_failed(Internal("broken"), now=2.0)
    assert actions[0] == SendNote("peer", DRAINED)
    assert error_of(actions).message == "broken"


def test_a_lost_peer_ends_the_push_without_a_note_once_its_write_has_failed() -> None:
    sender = pushing()
    sender.pages_ready([1], now=1.0)
    assert sender.peer_lost() == []
    actions = sender.write_failed(WorkerLost("gone"), now=2.0)
    assert len(actions) == 1
    assert isinstance(error_of(actions), WorkerLost)


def test_a_peer_lost_between_writes_ends_the_push_at_once() -> None:
    actions = pushing().peer_lost()
    assert len(actions) == 1
    assert isinstance(error_of(actions), WorkerLost)


def test_an_expired_ticket_ends_the_push() -> None:
    sender = pushing()
    assert sender.deadline == 10.0
    assert sender.tick(now=9.9) == []
    assert isinstance(error_of(sender.tick(now=10.0)), DeadlineExceeded)


def test_no_write_starts_after_expiry_even_before_the_tick() -> None:
    sender = pushing()
    actions = sender.pages_ready([1], now=10.0)
    assert actions[0] == SendNote("peer", DRAINED)
    assert isinstance(error_of(actions), DeadlineExceeded)


def test_a_write_that_outlives_the_ticket_is_waited_for() -> None:
    sender = pushing()
    sender.pages_ready([1], now=9.0)
    assert sender.tick(now=11.0) == []
    assert isinstance(error_of(sender.write_done(now=12.0)), DeadlineExceeded)


def test_a_last_write_that_began_in_time_may_land_after_expiry() -> None:
    sender = pushing()
    sender.finish(7, [1, 2, 3, 4], finished_at=9.0, now=9.0)
    assert sender.tick(now=11.0) == []
    assert sender.write_done(now=12.0) == [Ended(None, 400, 3.0, 3.0)]


@pytest.mark.parametrize("pages", [[1, 2, 3], [1, 2, 3, 4, 5]])
def test_pages_that_do_not_fit_the_reservation_end_the_push(pages: list[int]) -> None:
    actions = pushing().finish(7, pages, finished_at=1.0, now=1.0)
    assert f"{len(pages)} pages were made for 4" in error_of(actions).message


def test_a_ticket_of_another_attempt_ends_the_push() -> None:
    sender = Sender(KEY, "peer", PAGE_BYTES)
    actions = sender.ticket(ticket(epoch=1), now=0.0)
    assert actions[:-1] == [SendNote("peer", DRAINED)]
    assert "another attempt" in error_of(actions).message


def test_a_second_ticket_changes_nothing() -> None:
    sender = pushing()
    assert sender.ticket(ticket([1, 2, 3, 4]), now=1.0) == []
    assert sender.pages_ready([5], now=1.0) == [write([5], [40])]


class Walk:
    """One random life of a push, with what must always hold checked after every input."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sender = Sender(KEY, "peer", PAGE_BYTES)
        self.now = 0.0
        self.total = self.random.randint(1, 6)
        self.given = 0
        self.finished = self.ticketed = self.given_up = self.lost = False
        self.writing: StartWrite | None = None
        self.written: list[int] = []
        self.ended: Ended | None = None

    def inputs(self) -> list[str]:
        possible = ["tick", "cancel", "lose"] if self.random.random() < 0.2 else ["tick"]
        possible += ["write_done"] * 3 + ["write_failed"] if self.writing else []
        possible += [] if self.ticketed else ["ticket"] * 2
        possible += [] if self.finished else ["pages", "finish"]
        return possible

    def step(self) -> None:
        self.now += self.random.random()
        name = self.random.choice(self.inputs())
        for action in getattr(self, name)():
            self.check(action)

    def check(self, action: Action) -> None:
        assert self.ended is None, "nothing follows the end"
        match action:
            case StartWrite():
                assert self.writing is None, "one write at a time"
                assert not self.given_up, "nothing starts once the push was given up"
                assert self.now < 6.0, "nothing starts after expiry"
                self.writing = action
            case SendNote():
                assert self.writing is None, "drained means that nothing is under way"
                assert action.note == DRAINED
                assert not self.lost
            case Ended():
                assert self.writing is None, "no end with a write under way"
                self.ended = action

    def ticket(self) -> list[Action]:
        self.ticketed = True
        body = ticket([100 + i for i in range(self.total)], expires=6.0 - self.now)
        return self.sender.ticket(body, self.now)

    def pages(self) -> list[Action]:
        count = self.random.randint(0, self.total - self.given)
        return self.sender.pages_ready(self.take(count), self.now)

    def finish(self) -> list[Action]:
        self.finished = True
        return self.sender.finish(7, self.take(self.total - self.given), self.now, self.now)

    def take(self, count: int) -> list[int]:
        self.given += count
        return list(range(self.given - count, self.given))

    def write_done(self) -> list[Action]:
        assert self.writing is not None
        self.written += self.writing.local_pages
        assert all(r == 100 + p for p, r in zip(*self.both(), strict=True))
        self.writing = None
        return self.sender.write_done(self.now)

    def both(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        assert self.writing is not None
        return self.writing.local_pages, self.writing.remote_pages

    def write_failed(self) -> list[Action]:
        self.writing, self.given_up = None, True
        return self.sender.write_failed(Internal("broken"), self.now)

    def tick(self) -> list[Action]:
        return self.sender.tick(self.now)

    def cancel(self) -> list[Action]:
        self.given_up = True
        return self.sender.cancel()

    def lose(self) -> list[Action]:
        if not self.ticketed:
            return []
        self.given_up = self.lost = True
        return self.sender.peer_lost()


@pytest.mark.parametrize("first_seed", range(0, 2000, 500))
def test_random_lives_end_exactly_once_and_never_with_a_write_under_way(first_seed: int) -> None:
    landed = 0
    for seed in range(first_seed, first_seed + 500):
        walk = Walk(seed)
        while walk.ended is None:
            walk.step()
        if walk.ended.error is None:
            landed += 1
            assert walk.written == list(range(walk.total))
            assert walk.ended.bytes == PAGE_BYTES * walk.total
        assert walk.sender.state is State.DONE
    assert 50 < landed < 450, "the walk visits both kinds of ends"

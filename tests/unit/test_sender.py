from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from baton.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Internal,
    Unavailable,
    WorkerLost,
)
from baton.core.types import AttemptKey
from baton.kv_transfer import sender as machine
from baton.kv_transfer.sender import (
    Digest,
    Introduce,
    PeerSilent,
    Sender,
    SenderAction,
    SenderState,
)
from baton.kv_transfer.transfer_events import PushEnded, PushFailed, PushOverdue
from baton.kv_transfer.transfer_protocol import SendNote, drained_note, pack_note
from baton.kv_transfer.transport import PageWrite
from baton.v1.transfer_pb2 import Arrived, Beat, Resend, TicketBody, TransferNote

KEY = AttemptKey("request", 2)
PAGE_BYTES = 100
REMOTE = [40, 41, 42, 43]


def arrived_note(pages: int, digests: Sequence[int] = (), round: int = 0) -> bytes:
    arrived = Arrived(first_token=7, pages=pages, digests=digests, round=round)
    return pack_note(KEY, TransferNote(arrived=arrived))


ARRIVED = arrived_note(4)
DRAINED = drained_note(KEY)


def ticket(
    pages: list[int] = REMOTE,
    epoch: int = 2,
    expires: float = 60.0,
    held: int = 0,
) -> TicketBody:
    return TicketBody(
        request_id="request",
        epoch=epoch,
        agent="peer",
        pages=pages,
        expires_after_seconds=expires,
        lease_seconds=10.0,
        held_pages=held,
    )


def beat(number: int) -> SendNote:
    return SendNote(pack_note(KEY, TransferNote(beat=Beat(number=number))))


def write(local: list[int], remote: list[int], note: bytes = b"") -> PageWrite:
    return PageWrite("peer", tuple(local), tuple(remote), note)


def asking(expires: float = 60.0, digest: Digest | None = None) -> Sender:
    """A push with a ticket that came at time 0 and a first beat."""
    sender = Sender(KEY, "peer", PAGE_BYTES, digest)
    assert sender.ticket(ticket(expires=expires), now=0.0) == [beat(1)]
    return sender


def pushing(expires: float = 60.0, digest: Digest | None = None) -> Sender:
    """A push whose lease lasts until 10, and that beats next at 2."""
    sender = asking(expires, digest)
    assert sender.renewed(1, now=0.1) == []
    return sender


def confirming(digest: Digest | None = None) -> Sender:
    """A push whose last write ended at 2."""
    sender = pushing(digest=digest)
    sender.finish(7, [1, 2, 3, 4], finished_at=1.0, now=1.0)
    assert sender.write_done(now=2.0) == []
    assert sender.state is SenderState.CONFIRMING
    return sender


def error_of(actions: list[SenderAction]) -> BatonError:
    ended = actions[-1]
    assert isinstance(ended, PushEnded)
    assert ended.error is not None
    return ended.error


def test_pages_that_were_ready_before_the_ticket_go_out_as_one_write_with_the_note() -> None:
    sender = Sender(KEY, "peer", PAGE_BYTES)
    assert sender.pages_ready([1, 2], now=0.0) == []
    assert sender.finish(7, [3, 9], finished_at=1.0, now=1.0) == []
    assert sender.ticket(ticket(), now=2.0) == [beat(1)]
    assert sender.renewed(1, now=2.1) == [write([1, 2, 3, 9], REMOTE, ARRIVED)]
    assert sender.write_done(now=2.6) == []
    assert sender.accepted() == [PushEnded(KEY, None, 400, 0.5, 1.6)]


def test_pages_that_the_receiver_holds_are_not_written() -> None:
    asked: list[int] = []
    sender = Sender(KEY, "peer", PAGE_BYTES, lambda pages: asked.extend(pages) or list(pages))
    sender.pages_ready([1, 2], now=0.0)
    sender.ticket(ticket([41, 42], held=3), now=0.0)
    assert sender.renewed(1, now=0.1) == []
    assert sender.pages_ready([3, 4], now=1.0) == [write([4], [41])]
    sender.write_done(now=2.0)
    last = arrived_note(2, [4, 5])
    assert sender.finish(7, [5], finished_at=3.0, now=3.0) == [write([5], [42], last)]
    assert asked == [4, 5], "what does not move is not looked at"


def test_fewer_pages_than_the_receiver_holds_end_the_push() -> None:
    sender = Sender(KEY, "peer", PAGE_BYTES)
    sender.ticket(ticket([41], held=3), now=0.0)
    sender.renewed(1, now=0.1)
    actions = sender.finish(7, [1, 2, 3], finished_at=1.0, now=1.0)
    assert isinstance(error_of(actions), Internal)


def test_nothing_is_written_before_the_receiver_has_answered() -> None:
    sender = asking()
    assert sender.pages_ready([1], now=1.0) == []
    assert sender.renewed(7, now=1.1) == [], "an answer to another beat"
    assert sender.renewed(1, now=1.2) == [write([1], [40])]


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
    assert sender.write_done(now=3.0) == [write([4], [43], ARRIVED)]
    assert sender.write_done(now=4.0) == []
    assert sender.accepted() == [PushEnded(KEY, None, 400, 3.0, 2.0)]


def test_a_first_token_that_comes_during_the_last_write_follows_it_alone() -> None:
    sender = pushing()
    sender.pages_ready([1, 2, 3, 4], now=1.0)
    assert sender.finish(7, [], finished_at=2.0, now=2.0) == []
    assert sender.write_done(now=3.0) == [write([], [], ARRIVED)]


def test_a_long_push_is_cut_into_writes_that_leave_time_to_beat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "MAX_WRITE_BYTES", 3 * PAGE_BYTES)
    sender = pushing()
    assert sender.finish(7, [1, 2, 3, 4], finished_at=1.0, now=1.0) == [
        write([1, 2, 3], REMOTE[:3])
    ]
    assert sender.write_done(now=2.0) == [write([4], [43], ARRIVED)]


def test_a_push_beats_as_long_as_it_lasts() -> None:
    sender = pushing()
    assert sender.deadline == 2.0
    assert sender.tick(now=1.9) == []
    assert sender.tick(now=2.0) == [beat(2)]
    assert sender.tick(now=4.5) == [beat(3)]
    assert sender.deadline == 6.5


def test_a_lease_counts_from_when_the_answered_beat_was_sent() -> None:
    sender = pushing()
    sender.tick(now=2.0)
    sender.tick(now=4.0)
    assert sender.renewed(2, now=9.0) == []
    sender.tick(now=11.0)
    silent, note, ended = sender.tick(now=12.0)
    assert isinstance(silent, PeerSilent)
    assert note == SendNote(DRAINED)
    assert isinstance(error_of([ended]), Unavailable)


def test_an_old_answer_does_not_shorten_a_lease() -> None:
    sender = pushing()
    sender.tick(now=2.0)
    sender.tick(now=4.0)
    sender.renewed(3, now=5.0)
    assert sender.renewed(2, now=6.0) == []
    assert sender.tick(now=13.9) == [beat(4)]


def test_no_write_starts_under_a_lapsed_lease_even_before_the_tick() -> None:
    actions = pushing().pages_ready([1], now=10.0)
    assert isinstance(actions[0], PeerSilent)
    assert actions[1] == SendNote(DRAINED)
    assert isinstance(error_of(actions), Unavailable)


def test_a_lease_that_lapses_during_a_write_fails_at_once_and_ends_with_the_write() -> None:
    sender = pushing()
    sender.pages_ready([1], now=1.0)
    _, fail = sender.tick(now=10.0)
    assert isinstance(fail, PushFailed)
    assert isinstance(fail.error, Unavailable)
    assert sender.tick(now=11.0) == [PushOverdue(KEY)]
    assert sender.deadline == math.inf
    actions = sender.write_done(now=99.0)
    assert actions[0] == SendNote(DRAINED)
    assert error_of(actions) is fail.error


def test_an_unanswered_first_beat_is_repeated_with_an_introduction() -> None:
    sender = asking()
    assert sender.tick(now=2.0) == [Introduce(), beat(2)]


def test_a_receiver_that_never_answers_ends_the_push() -> None:
    assert isinstance(error_of(asking().tick(now=10.0)), Unavailable)


def test_a_revoked_lease_ends_the_push_and_says_drained() -> None:
    actions = pushing().revoked()
    assert actions[0] == SendNote(DRAINED)
    assert isinstance(error_of(actions), Unavailable)


def test_landed_is_repeated_until_it_is_accepted() -> None:
    sender = confirming()
    assert sender.tick(now=2.0) == [SendNote(ARRIVED), beat(2)]
    assert isinstance(sender.accepted()[0], PushEnded)


def test_acceptance_that_overtakes_the_end_of_the_write_counts() -> None:
    sender = pushing()
    sender.finish(7, [1, 2, 3, 4], finished_at=1.0, now=1.0)
    assert sender.accepted() == []
    assert sender.deadline == math.inf
    assert sender.revoked() == []
    assert sender.write_done(now=2.0) == [PushEnded(KEY, None, 400, 1.0, 1.0)]


def test_damaged_pages_are_written_again_with_their_first_digests() -> None:
    sender = confirming(lambda pages: [90 + page for page in pages])
    (again,) = sender.resend(Resend(positions=[0, 2], round=1), now=3.0)
    note = arrived_note(4, [91, 92, 93, 94], round=1)
    assert again == write([1, 3], [40, 42], note)
    assert sender.write_done(now=4.0) == []
    assert isinstance(sender.accepted()[0], PushEnded)


def test_an_order_to_resend_is_carried_out_once() -> None:
    sender = confirming()
    sender.resend(Resend(positions=[0], round=1), now=3.0)
    assert sender.resend(Resend(positions=[0], round=1), now=3.1) == []
    assert sender.write_done(now=4.0) == []
    assert sender.resend(Resend(positions=[0], round=1), now=4.1) == []


def test_an_order_to_resend_that_overtakes_the_end_of_the_write_is_kept() -> None:
    sender = pushing()
    sender.finish(7, [1, 2, 3, 4], finished_at=1.0, now=1.0)
    assert sender.resend(Resend(positions=[3], round=1), now=1.5) == []
    assert sender.write_done(now=2.0) == [write([4], [43], arrived_note(4, round=1))]


def test_an_order_to_resend_what_was_never_sent_ends_the_push() -> None:
    actions = confirming().resend(Resend(positions=[4], round=1), now=3.0)
    assert isinstance(error_of(actions), Internal)


def test_a_push_that_is_cancelled_before_its_ticket_ends_at_once() -> None:
    sender = Sender(KEY, "peer", PAGE_BYTES)
    sender.pages_ready([1], now=0.0)
    actions = sender.cancel()
    assert actions[:-1] == [SendNote(DRAINED)]
    assert isinstance(error_of(actions), Cancelled)
    assert sender.ticket(ticket(), now=1.0) == []


def test_a_cancelled_push_waits_for_its_write_and_then_says_drained() -> None:
    sender = pushing()
    sender.pages_ready([1], now=1.0)
    assert isinstance(sender.cancel()[0], PushFailed)
    assert sender.pages_ready([2], now=1.5) == []
    assert sender.finish(7, [3, 4], finished_at=1.6, now=1.6) == []
    actions = sender.write_done(now=2.0)
    assert actions[0] == SendNote(DRAINED)
    assert isinstance(error_of(actions), Cancelled)


def test_a_push_that_is_cancelled_between_writes_says_drained_at_once() -> None:
    sender = pushing()
    sender.pages_ready([1], now=1.0)
    sender.write_done(now=2.0)
    assert sender.cancel()[0] == SendNote(DRAINED)


def test_a_push_that_is_cancelled_while_landing_ends_cancelled() -> None:
    sender = pushing()
    sender.finish(7, [1, 2, 3, 4], finished_at=1.0, now=1.0)
    assert sender.state is SenderState.FINISHING
    assert isinstance(sender.cancel()[0], PushFailed)
    assert isinstance(error_of(sender.write_done(now=2.0)), Cancelled)


def test_a_failed_write_ends_the_push_with_its_error_and_says_drained() -> None:
    sender = pushing()
    sender.pages_ready([1], now=1.0)
    actions = sender.write_failed(Internal("broken"), now=2.0)
    assert actions[0] == SendNote(DRAINED)
    assert error_of(actions).message == "broken"


def test_a_lost_peer_ends_the_push_without_a_note_once_its_write_has_failed() -> None:
    sender = pushing()
    sender.pages_ready([1], now=1.0)
    assert isinstance(sender.peer_lost()[0], PushFailed)
    actions = sender.write_failed(WorkerLost("gone"), now=2.0)
    assert len(actions) == 1
    assert isinstance(error_of(actions), WorkerLost)


def test_a_peer_lost_between_writes_ends_the_push_at_once() -> None:
    actions = pushing().peer_lost()
    assert len(actions) == 1
    assert isinstance(error_of(actions), WorkerLost)


def test_an_expired_ticket_ends_the_push() -> None:
    sender = pushing(expires=1.0)
    assert sender.deadline == 1.0
    assert isinstance(error_of(sender.tick(now=1.0)), DeadlineExceeded)


def test_no_write_starts_after_expiry_even_before_the_tick() -> None:
    actions = pushing(expires=1.0).pages_ready([1], now=1.0)
    assert actions[0] == SendNote(DRAINED)
    assert isinstance(error_of(actions), DeadlineExceeded)


def test_a_last_write_that_began_in_time_may_land_after_expiry() -> None:
    sender = pushing(expires=1.5)
    sender.finish(7, [1, 2, 3, 4], finished_at=1.0, now=1.0)
    assert sender.tick(now=1.9) == []
    assert sender.write_done(now=1.9) == []


@pytest.mark.parametrize("pages", [[1, 2, 3], [1, 2, 3, 4, 5]])
def test_pages_that_do_not_fit_the_reservation_end_the_push(pages: list[int]) -> None:
    actions = pushing().finish(7, pages, finished_at=1.0, now=1.0)
    assert f"{len(pages)} pages were made for 4" in error_of(actions).message


def test_a_ticket_of_another_attempt_ends_the_push() -> None:
    sender = Sender(KEY, "peer", PAGE_BYTES)
    actions = sender.ticket(ticket(epoch=1), now=0.0)
    assert actions[:-1] == [SendNote(DRAINED)]
    assert "another attempt" in error_of(actions).message


def test_a_second_ticket_changes_nothing() -> None:
    sender = pushing()
    assert sender.ticket(ticket([1, 2, 3, 4]), now=1.0) == []
    assert sender.pages_ready([5], now=1.0) == [write([5], [40])]

"""Random sequences of inputs to a push."""

from __future__ import annotations

import random

import pytest

from baton.core.errors import Internal
from baton.core.types import AttemptKey
from baton.kv_transfer.sender import Sender, SenderAction, SenderState
from baton.kv_transfer.transfer_events import PushEnded, PushFailed
from baton.kv_transfer.transfer_protocol import SendNote, drained_note, parse_note
from baton.kv_transfer.transport import PageWrite
from baton.v1.transfer_pb2 import Resend, TicketBody

KEY = AttemptKey("request", 2)
PAGE_BYTES = 100
LEASE_SECONDS = 3.0


class Walk:
    """One random life of a push, with what must always hold checked after every input."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sender = Sender(KEY, "peer", PAGE_BYTES)
        self.now = 0.0
        self.total = self.random.randint(1, 6)
        self.given = self.round = 0
        self.finished = self.ticketed = self.given_up = self.lost = False
        self.lease_until = 0.0
        self.beats: dict[int, float] = {}
        self.writing: PageWrite | None = None
        self.written: set[int] = set()
        self.ended: PushEnded | None = None

    def inputs(self) -> list[str]:
        possible = ["cancel", "lose", "revoke"] if self.random.random() < 0.1 else []
        possible += ["tick", "renew", "renew"]
        possible += ["write_done"] * 3 + ["write_failed"] if self.writing else []
        possible += [] if self.ticketed else ["ticket"] * 2
        possible += [] if self.finished else ["pages", "finish"]
        arrived = self.finished and len(self.written) == self.total
        return possible + (["accept", "accept", "resend"] if arrived else [])

    def step(self) -> None:
        self.now += self.random.random()
        name = self.random.choice(self.inputs())
        for action in getattr(self, name)():
            self.check(action)

    def check(self, action: SenderAction) -> None:
        assert self.ended is None, "nothing follows the end"
        match action:
            case PageWrite():
                assert self.writing is None, "one write at a time"
                assert not self.given_up, "nothing starts once the push was given up"
                assert self.now < self.lease_until, "nothing starts without a lease"
                self.writing = action
            case SendNote():
                self.check_note(action.note)
            case PushFailed():
                assert self.writing is not None
                self.given_up = True
            case PushEnded():
                assert self.writing is None, "no end with a write under way"
                self.ended = action

    def check_note(self, data: bytes) -> None:
        note = parse_note(data)
        assert note is not None
        match note.WhichOneof("kind"):
            case "beat":
                self.beats[note.beat.number] = self.now
            case "arrived":
                assert len(self.written) == self.total, "arrived means that all is written"
            case _:
                assert data == drained_note(KEY)
                assert self.writing is None, "drained means that nothing is under way"
                assert not self.lost
                self.given_up = True

    def ticket(self) -> list[SenderAction]:
        self.ticketed = True
        body = TicketBody(
            request_id=KEY.request_id,
            epoch=KEY.epoch,
            agent="peer",
            pages=[100 + page for page in range(self.total)],
            expires_after_seconds=60.0,
            lease_seconds=LEASE_SECONDS,
        )
        return self.sender.ticket(body, self.now)

    def renew(self) -> list[SenderAction]:
        if not self.beats:
            return []
        number = self.random.choice(list(self.beats))
        self.lease_until = max(self.lease_until, self.beats[number] + LEASE_SECONDS)
        return self.sender.renewed(number, self.now)

    def pages(self) -> list[SenderAction]:
        count = self.random.randint(0, self.total - self.given)
        return self.sender.pages_ready(self.take(count), self.now)

    def finish(self) -> list[SenderAction]:
        self.finished = True
        return self.sender.finish(7, self.take(self.total - self.given), self.now, self.now)

    def take(self, count: int) -> list[int]:
        self.given += count
        return list(range(self.given - count, self.given))

    def write_done(self) -> list[SenderAction]:
        assert self.writing is not None
        local, remote = self.writing.local_pages, self.writing.remote_pages
        assert [100 + page for page in local] == list(remote)
        self.written |= set(local)
        self.writing = None
        return self.sender.write_done(self.now)

    def write_failed(self) -> list[SenderAction]:
        self.writing, self.given_up = None, True
        return self.sender.write_failed(Internal("broken"), self.now)

    def accept(self) -> list[SenderAction]:
        return self.sender.accepted()

    def resend(self) -> list[SenderAction]:
        self.round += self.random.randint(0, 1)
        positions = [self.random.randrange(self.total)]
        return self.sender.resend(Resend(positions=positions, round=self.round), self.now)

    def tick(self) -> list[SenderAction]:
        return self.sender.tick(self.now)

    def revoke(self) -> list[SenderAction]:
        return self.sender.revoked()

    def cancel(self) -> list[SenderAction]:
        return self.sender.cancel()

    def lose(self) -> list[SenderAction]:
        if not self.ticketed:
            return []
        self.lost = True
        return self.sender.peer_lost()


@pytest.mark.parametrize("first_seed", range(0, 2000, 500))
def test_random_lives_end_exactly_once_and_never_with_a_write_under_way(first_seed: int) -> None:
    arrived = 0
    for seed in range(first_seed, first_seed + 500):
        walk = Walk(seed)
        while walk.ended is None:
            walk.step()
        if walk.ended.error is None:
            arrived += 1
            assert walk.written == set(range(walk.total))
            assert walk.ended.bytes >= PAGE_BYTES * walk.total
        assert walk.sender.state is SenderState.DONE
    assert 50 < arrived < 450, "the walk visits both kinds of ends"

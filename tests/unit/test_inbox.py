"""How what workers say reaches those who follow an attempt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from baton.core.errors import SlowReader
from baton.router.requests.attempt import AttemptEvent
from baton.router.requests.inbox import Inbox, Rounds
from baton.v1 import worker_pb2 as pb


def token(number: int) -> pb.StepTokens:
    return pb.StepTokens(token_ids=[number])


class Follower:
    """Keeps what it takes, until it has `wanted` events."""

    def __init__(
        self, wanted: int, patience: float = 5.0, on_take: Callable[[], None] = lambda: None
    ) -> None:
        self.patience = patience
        self.taken: list[list[AttemptEvent]] = []
        self._wanted = wanted
        self._on_take = on_take

    def take(self, events: list[AttemptEvent]) -> bool:
        self._on_take()
        self.taken.append(events)
        return sum(map(len, self.taken)) < self._wanted


async def test_what_has_come_is_taken_together_and_in_order() -> None:
    inbox, follower = Inbox(Rounds()), Follower(2)
    events: list[AttemptEvent] = [token(1), token(2)]
    for event in events:
        inbox.put_nowait(event)
    assert await inbox.follow(follower)
    assert follower.taken == [events]


async def test_a_follower_is_called_with_what_comes_until_it_wants_no_more() -> None:
    inbox, follower = Inbox(Rounds()), Follower(2)
    following = asyncio.ensure_future(inbox.follow(follower))
    for number in range(2):
        await asyncio.sleep(0.01)
        inbox.put_nowait(token(number))
    assert await following
    inbox.put_nowait(token(2))
    await asyncio.sleep(0.01)
    assert follower.taken == [[token(0)], [token(1)]]


async def test_followers_are_called_one_after_the_other_in_one_turn_of_the_loop() -> None:
    rounds = Rounds()
    pairs = [(Inbox(rounds), Follower(1)) for _ in range(3)]
    tasks = [asyncio.ensure_future(inbox.follow(follower)) for inbox, follower in pairs]
    await asyncio.sleep(0)
    for inbox, _ in pairs:
        inbox.put_nowait(token(1))
    await asyncio.sleep(0)
    assert [follower.taken for _, follower in pairs] == [[[token(1)]]] * 3
    await asyncio.gather(*tasks)


async def test_following_ends_when_nothing_comes_for_so_long() -> None:
    inbox, follower = Inbox(Rounds()), Follower(9, patience=0.2)
    following = asyncio.ensure_future(inbox.follow(follower))
    await asyncio.sleep(0)
    # The timer is set for the first wait, which is longer.
    follower.patience = 0.01
    began = time.monotonic()
    inbox.put_nowait(token(1))
    assert not await following
    assert time.monotonic() - began < 0.2


async def test_a_wait_that_something_ended_begins_anew() -> None:
    inbox, follower = Inbox(Rounds()), Follower(3, patience=0.3)
    following = asyncio.ensure_future(inbox.follow(follower))
    for number in range(3):
        await asyncio.sleep(0.2)
        inbox.put_nowait(token(number))
    assert await following


async def test_what_a_follower_raises_ends_the_following() -> None:
    def refuse() -> None:
        raise SlowReader("too slow")

    inbox = Inbox(Rounds())
    inbox.put_nowait(token(1))
    with pytest.raises(SlowReader):
        await inbox.follow(Follower(1, on_take=refuse))


async def test_while_a_round_takes_long_what_comes_waits_together() -> None:
    rounds = Rounds()
    pairs = [
        # What passing a token on costs.
        (Inbox(rounds), Follower(3, on_take=lambda: time.sleep(0.02)))
        for _ in range(2)
    ]
    tasks = [asyncio.ensure_future(inbox.follow(follower)) for inbox, follower in pairs]
    await asyncio.sleep(0)
    for number in range(3):
        for inbox, _ in pairs:
            inbox.put_nowait(token(number))
        await asyncio.sleep(0.005 if number else 0)
    await asyncio.gather(*tasks)
    assert [follower.taken for _, follower in pairs] == [[[token(0)], [token(1), token(2)]]] * 2


async def test_following_that_is_given_up_takes_no_more() -> None:
    inbox, follower = Inbox(Rounds()), Follower(9)
    following = asyncio.ensure_future(inbox.follow(follower))
    await asyncio.sleep(0)
    inbox.put_nowait(token(1))
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert not follower.taken

"""How what workers say reaches those who wait for it."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.v1 import worker_pb2 as pb
from router.attempt import Event
from router.inbox import Inbox, Rounds


def token(number: int) -> pb.StepTokens:
    return pb.StepTokens(token_ids=[number])


async def test_what_has_come_is_taken_at_once_and_in_order() -> None:
    inbox = Inbox(Rounds())
    events: list[Event] = [token(1), token(2)]
    for event in events:
        inbox.put_nowait(event)
    assert await inbox.take(1.0) == events


async def test_whoever_waits_is_woken_by_what_comes() -> None:
    inbox = Inbox(Rounds())
    waiting = asyncio.ensure_future(inbox.take(5.0))
    for _ in range(3):
        await asyncio.sleep(0.01)
        inbox.put_nowait(token(3))
        assert await waiting == [token(3)]
        waiting = asyncio.ensure_future(inbox.take(5.0))
    waiting.cancel()


async def test_a_wait_ends_when_nothing_comes_for_so_long() -> None:
    inbox = Inbox(Rounds())
    # Its timer is set for the first wait, which is longer.
    waiting = asyncio.ensure_future(inbox.take(0.2))
    await asyncio.sleep(0)
    inbox.put_nowait(token(1))
    await waiting
    with pytest.raises(TimeoutError):
        await inbox.take(0.3)
    with pytest.raises(TimeoutError):
        await inbox.take(0.01)


async def test_while_a_round_takes_long_what_comes_waits_together() -> None:
    rounds = Rounds()
    inboxes = [Inbox(rounds), Inbox(rounds)]

    async def follow(inbox: Inbox) -> list[Event]:
        await inbox.take(5.0)
        time.sleep(0.02)  # noqa: ASYNC251 what passing a token on costs
        return await inbox.take(5.0)

    tasks = [asyncio.ensure_future(follow(inbox)) for inbox in inboxes]
    await asyncio.sleep(0)
    for number in range(3):
        for inbox in inboxes:
            inbox.put_nowait(token(number))
        if number == 0:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(0.005)
    assert await asyncio.gather(*tasks) == [[token(1), token(2)]] * 2


async def test_a_wait_that_is_given_up_leaves_what_comes_for_the_next() -> None:
    inbox = Inbox(Rounds())
    waiting = asyncio.ensure_future(inbox.take(5.0))
    await asyncio.sleep(0)
    inbox.put_nowait(token(1))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await inbox.take(1.0) == [token(1)]
    inbox.close()

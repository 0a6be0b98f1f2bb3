"""How events of an attempt reach its handler."""

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


class Handler:
    """Keeps the events it handles, until it has `wanted` of them."""

    def __init__(
        self, wanted: int, seconds: float = 5.0, on_call: Callable[[], None] = lambda: None
    ) -> None:
        self.seconds = seconds
        self.handled: list[list[AttemptEvent]] = []
        self._wanted = wanted
        self._on_call = on_call

    def __call__(self, events: list[AttemptEvent]) -> float:
        self._on_call()
        self.handled.append(events)
        return self.seconds if sum(map(len, self.handled)) < self._wanted else 0.0


def inbox_of(handler: Handler, rounds: Rounds | None = None) -> Inbox:
    return Inbox(rounds or Rounds(), handler)


async def test_waiting_events_are_handled_together_and_in_order() -> None:
    handler = Handler(2)
    inbox = inbox_of(handler)
    events: list[AttemptEvent] = [token(1), token(2)]
    for event in events:
        inbox.put(event)
    assert await inbox.drain(handler.seconds)
    assert handler.handled == [events]


async def test_a_handler_is_called_until_it_ends_the_draining() -> None:
    handler = Handler(2)
    inbox = inbox_of(handler)
    draining = asyncio.ensure_future(inbox.drain(handler.seconds))
    for number in range(2):
        await asyncio.sleep(0.01)
        inbox.put(token(number))
    assert await draining
    inbox.put(token(2))
    await asyncio.sleep(0.01)
    assert handler.handled == [[token(0)], [token(1)]]


async def test_handlers_run_one_after_the_other_in_one_iteration_of_the_loop() -> None:
    rounds = Rounds()
    handlers = [Handler(1) for _ in range(3)]
    pairs = [(inbox_of(handler, rounds), handler) for handler in handlers]
    tasks = [asyncio.ensure_future(inbox.drain(handler.seconds)) for inbox, handler in pairs]
    await asyncio.sleep(0)
    for inbox, _ in pairs:
        inbox.put(token(1))
    await asyncio.sleep(0)
    assert [handler.handled for _, handler in pairs] == [[[token(1)]]] * 3
    await asyncio.gather(*tasks)


async def test_draining_ends_when_no_event_comes_in_time() -> None:
    handler = Handler(9, seconds=0.2)
    inbox = inbox_of(handler)
    draining = asyncio.ensure_future(inbox.drain(handler.seconds))
    await asyncio.sleep(0)
    # The timer is set for the first wait, which is longer.
    handler.seconds = 0.01
    began = time.monotonic()
    inbox.put(token(1))
    assert not await draining
    assert time.monotonic() - began < 0.2


async def test_an_event_restarts_the_wait() -> None:
    handler = Handler(3, seconds=1.0)
    inbox = inbox_of(handler)
    draining = asyncio.ensure_future(inbox.drain(handler.seconds))
    for number in range(3):
        await asyncio.sleep(0.4)
        inbox.put(token(number))
    assert await draining


async def test_an_error_of_the_handler_ends_the_draining() -> None:
    def refuse() -> None:
        raise SlowReader("too slow")

    inbox = inbox_of(Handler(1, on_call=refuse))
    inbox.put(token(1))
    with pytest.raises(SlowReader):
        await inbox.drain(5.0)


async def test_events_that_come_during_a_long_round_are_handled_together() -> None:
    rounds = Rounds()
    # What emitting a token costs.
    handlers = [Handler(3, on_call=lambda: time.sleep(0.02)) for _ in range(2)]
    pairs = [(inbox_of(handler, rounds), handler) for handler in handlers]
    tasks = [asyncio.ensure_future(inbox.drain(handler.seconds)) for inbox, handler in pairs]
    await asyncio.sleep(0)
    for number in range(3):
        for inbox, _ in pairs:
            inbox.put(token(number))
        await asyncio.sleep(0.005 if number else 0)
    await asyncio.gather(*tasks)
    assert [handler.handled for _, handler in pairs] == [[[token(0)], [token(1), token(2)]]] * 2


async def test_a_cancelled_drain_handles_no_more() -> None:
    handler = Handler(9)
    inbox = inbox_of(handler)
    draining = asyncio.ensure_future(inbox.drain(handler.seconds))
    await asyncio.sleep(0)
    inbox.put(token(1))
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    assert not handler.handled


async def test_a_timeout_may_be_extended() -> None:
    handler, asked = Handler(1), []

    def more_time() -> float:
        asked.append(1)
        return 0.01 if len(asked) < 3 else 0.0

    assert not await Inbox(Rounds(), handler, more_time).drain(0.01)
    assert len(asked) == 3

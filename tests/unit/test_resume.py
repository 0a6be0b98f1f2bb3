"""Streams that are resumed: what the client sends, and what a router makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from front_door import LETTER, front_door
from scripted_router import ScriptedRouter

from baton import AsyncClient, Client, FinishReason, InvalidRequest, Unavailable
from baton.core.types import AttemptKey, Sampling, Work
from baton.request_builder import generate_request
from baton.router.requests.retries import RetryState

PROMPT = [5] * 8


@pytest.fixture
def broken() -> Iterator[ScriptedRouter]:
    """A router that is lost after its first tokens."""
    router = ScriptedRouter()
    router.error = Unavailable("gone")
    yield router
    router.stop()


@pytest.fixture
def other() -> Iterator[ScriptedRouter]:
    router = ScriptedRouter()
    router.pieces = [", there"]
    yield router
    router.stop()


def test_a_client_sends_the_seed_and_the_tokens_that_it_has(
    broken: ScriptedRouter, other: ScriptedRouter
) -> None:
    with Client(broken.address) as first, Client(other.address) as second:
        stream = first.stream("hello", temperature=0.5)
        with pytest.raises(Unavailable):
            stream.read()
        answer = second.resume(stream).read()
    (sent,), (resumed,) = broken.requests, other.requests
    assert resumed.text == sent.text
    assert resumed.sampling.temperature == sent.sampling.temperature
    assert resumed.sampling.HasField("seed")
    assert resumed.resumed_token_ids == [0, 1, 2]
    assert answer.text == "Once upon a time, there"


async def test_asyncio_resumes_alike(broken: ScriptedRouter, other: ScriptedRouter) -> None:
    async with AsyncClient(broken.address) as first, AsyncClient(other.address) as second:
        stream = first.stream("hello")
        with pytest.raises(Unavailable):
            await stream.read()
        answer = await second.resume(stream).read()
    assert answer.text == "Once upon a time, there"


def test_a_stream_that_never_began_is_sent_again(other: ScriptedRouter) -> None:
    with Client("127.0.0.1:1") as nowhere, Client(other.address) as client:
        stream = nowhere.stream("hello")
        with pytest.raises(Unavailable):
            stream.read()
        assert client.resume(stream).read().text == ", there"
    assert not other.requests[0].resumed_token_ids
    assert not other.requests[0].sampling.HasField("seed")


def test_several_answers_are_not_resumed(broken: ScriptedRouter) -> None:
    with Client(broken.address) as client:
        stream = client.stream("hello", n=2)
        with pytest.raises(Unavailable):
            stream.read()
        with pytest.raises(InvalidRequest, match="several answers"):
            client.resume(stream)


async def test_a_router_emits_what_follows_the_resumed_tokens() -> None:
    async with front_door() as door, AsyncClient(door.address) as client:
        stream = client.stream(PROMPT, max_tokens=8, ignore_eos=True, seed=1)
        request = stream._request
        await stream.read()
        request.resumed_token_ids[:] = [LETTER] * 5
        rest = await client._stream(request, None).read()
        assert rest.token_ids == (LETTER,) * 3
        assert (rest.usage.prompt_tokens, rest.usage.completion_tokens) == (8, 8)
        request.resumed_token_ids[:] = [LETTER] * 8
        end = await client._stream(request, None).read()
        assert end.token_ids == ()
        assert end.finish_reason is FinishReason.LENGTH
        assert not end.placements


@pytest.mark.parametrize(
    ("tokens", "changes"),
    [
        ([LETTER] * 9, {"seed": 1}),
        ([2**31], {"seed": 1}),
        ([LETTER], {}),
        ([LETTER], {"seed": 1, "n": 2}),
    ],
)
async def test_what_cannot_be_resumed_is_refused(tokens: list[int], changes: Any) -> None:
    request = generate_request(PROMPT, {"max_tokens": 8, **changes})
    request.resumed_token_ids[:] = tokens
    async with front_door() as door, AsyncClient(door.address) as client:
        with pytest.raises(InvalidRequest) as refused:
            await client._stream(request, None).read()
    assert refused.value.field == "resumed_token_ids"


def test_the_first_attempt_prefills_resumed_tokens_too() -> None:
    work = Work(AttemptKey("r", 1), [1, 2], Sampling(), 8, frozenset())
    state = RetryState(work, max_deaths=2, max_attempts=8)
    state.resume([3, 4])
    assert list(state.work.prompt_tokens) == [1, 2, 3, 4]
    assert state.work.answer_tokens == 2
    assert state.work.key == work.key
    assert not state.is_retry

"""The asyncio client against a real gRPC server."""

from __future__ import annotations

import asyncio

import pytest
from scripted_router import ScriptedRouter

from baton import (
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    Unavailable,
    Usage,
)


async def test_the_async_client_gives_the_same_answer(
    async_client: AsyncClient, client: Client
) -> None:
    assert await async_client.generate("hello", seed=3) == await asyncio.to_thread(
        client.generate, "hello", seed=3
    )


async def test_the_async_client_chats(async_client: AsyncClient, router: ScriptedRouter) -> None:
    answer = await async_client.chat([("user", "hi")])
    assert answer.text == "Once upon a time"
    assert router.requests[0].chat.messages[0].content == "hi"


async def test_an_async_stream_gives_each_piece_and_then_the_answer(
    async_client: AsyncClient,
) -> None:
    async with async_client.stream("hello") as stream:
        assert [delta.text async for delta in stream] == ["Once", " upon", " a time"]
        assert stream.answer.usage == Usage(4, 3, 2)


async def test_the_async_client_gets_the_clusters_status(
    async_client: AsyncClient, router: ScriptedRouter
) -> None:
    await async_client.wait_ready(timeout=5)
    assert await async_client.status() == router.status
    assert [model.name for model in await async_client.models()] == ["tale"]
    tokens = await async_client.tokenize("héllo")
    assert await async_client.detokenize(tokens.token_ids) == "héllo"


async def test_a_closed_async_client_says_so(router: ScriptedRouter) -> None:
    for calls in (0, 1):
        client = AsyncClient(router.address)
        for _ in range(calls):
            await client.status()
        await client.close()
        with pytest.raises(Unavailable, match="this client is closed"):
            await client.status()
        with pytest.raises(Unavailable, match="this client is closed"):
            client.stream("hello")


async def test_cancelling_the_task_cancels_the_request(
    async_client: AsyncClient, router: ScriptedRouter
) -> None:
    router.hang = True
    task = asyncio.create_task(async_client.generate("hello"))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(router.over.wait, 5)


async def test_leaving_an_async_block_early_cancels_the_request(
    async_client: AsyncClient, router: ScriptedRouter
) -> None:
    router.hang = True
    async with async_client.stream("hello") as stream:
        await anext(aiter(stream))
    assert await asyncio.to_thread(router.over.wait, 5)


async def test_iterating_a_cancelled_async_stream_raises_cancelled(
    async_client: AsyncClient, router: ScriptedRouter
) -> None:
    router.hang = True
    async with async_client.stream("hello") as stream:
        asyncio.get_running_loop().call_later(0.1, stream.cancel)
        with pytest.raises(Cancelled):
            await stream.read()


async def test_the_async_client_names_a_cluster_that_is_not_there(closed_port: int) -> None:
    address = f"127.0.0.1:{closed_port}"
    async with AsyncClient(address) as client:
        with pytest.raises(Unavailable, match=address):
            await client.models()


async def test_a_deadline_passes_in_the_async_client(
    async_client: AsyncClient, router: ScriptedRouter
) -> None:
    router.hang = True
    with pytest.raises(DeadlineExceeded):
        await async_client.generate("hello", timeout=0.2)


def test_an_async_client_may_be_made_before_its_loop(router: ScriptedRouter) -> None:
    client = AsyncClient(router.address)

    async def use() -> str:
        async with client:
            return (await client.generate("hello")).text

    assert asyncio.run(use()) == "Once upon a time"

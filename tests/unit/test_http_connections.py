"""HTTP connections: how long the server keeps idle ones, and which give way at the limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.responses import PlainTextResponse

from baton.core.config import TlsConfig
from baton.router.edges.http import http_server
from baton.router.edges.http.http_server import HttpServer

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"


class Connection:
    """A client's connection. The server answers each head with "yes"."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def is_answered(self, head: bytes = GET) -> bool:
        """Sends it. False if the server has closed the connection."""
        async with asyncio.timeout(10):
            try:
                self.send(head)
                answer = await self._reader.readuntil(b"yes")
            except (asyncio.IncompleteReadError, ConnectionError):
                return False
        return answer.startswith(b"HTTP/1.1 200")

    def send(self, content: bytes) -> None:
        self._writer.write(content)

    async def ends(self) -> None:
        async with asyncio.timeout(10):
            assert await self._reader.read() == b""

    def close(self) -> None:
        self._writer.close()


class Server:
    def __init__(self, address: str) -> None:
        self._address = address
        self._opened: list[Connection] = []

    async def open(self) -> Connection:
        connection = Connection(*await asyncio.open_connection(*self._address.split(":")))
        self._opened.append(connection)
        return connection

    def close_all(self) -> None:
        for connection in self._opened:
            connection.close()


@asynccontextmanager
async def served(max_connections: int = 100) -> AsyncIterator[Server]:
    http = HttpServer(PlainTextResponse("yes"), lambda: None, TlsConfig(), max_connections)
    server = Server(http.start("127.0.0.1", 0))
    try:
        yield server
    finally:
        server.close_all()
        await http.stop(0.5)


async def test_an_idle_connection_outlives_those_of_clients() -> None:
    """httpx and the OpenAI SDK use one again that has been idle for up to five seconds."""
    async with served() as server:
        connection = await server.open()
        assert await connection.is_answered()
        await asyncio.sleep(6.5)
        assert await connection.is_answered()


async def test_a_body_that_comes_after_its_answer_shortens_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 1.0)
    async with served() as server:
        connection = await server.open()
        assert await connection.is_answered(POST)
        connection.send(b"body")
        await asyncio.sleep(1.5)
        assert await connection.is_answered()


async def test_a_body_that_never_comes_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.2)
    async with served() as server:
        connection = await server.open()
        assert await connection.is_answered(POST)
        await connection.ends()


async def test_an_idle_connection_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_SECONDS", 0.2)
    async with served() as server:
        plain, late = await server.open(), await server.open()
        assert await plain.is_answered()
        assert await late.is_answered(POST)
        late.send(b"body")
        await plain.ends()
        await late.ends()


async def test_at_the_limit_the_connection_that_is_idle_for_longest_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "READ_SECONDS", 0.0)
    async with served(max_connections=3) as server:
        first, second, third = [await server.open() for _ in range(3)]
        for connection in (first, second, third, first):
            assert await connection.is_answered()
        assert await (await server.open()).is_answered()
        await second.ends()
        for connection in (first, third):
            assert await connection.is_answered()


@pytest.mark.parametrize("head", [b"", GET[:5], GET])
async def test_beyond_the_limit_a_connection_is_closed_if_no_other_may_be(
    head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's client may still read its answer, or has not sent all of its request."""
    monkeypatch.setattr(http_server, "READ_SECONDS", 1000.0)
    async with served(max_connections=1) as server:
        only = await server.open()
        only.send(head)
        rest = GET.removeprefix(head)
        assert rest or await only.is_answered(b"")
        beyond = await server.open()
        assert not await beyond.is_answered()
        assert await only.is_answered(rest or GET)

"""One connection to a Redis, with any number of commands in flight.

Speaks RESP2, which every version of Redis understands.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from baton.core.errors import InvalidConfig

Reply = bytes | int | list[bytes] | None
DEFAULT_PORT = 6379


class RedisRefused(Exception):
    """An error that Redis replied with."""


@dataclass(frozen=True, slots=True)
class RedisAddress:
    host: str
    port: int
    user: str
    password: str
    database: int
    tls: bool

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Parses redis://[[user]:password@]host[:port][/database], or rediss:// for TLS."""
        parts = urlsplit(url)
        database = parts.path.strip("/") or "0"
        try:
            port = parts.port or DEFAULT_PORT
        except ValueError:
            port = 0
        wrong = parts.scheme not in ("redis", "rediss") or not parts.hostname
        if wrong or not port or not database.isdecimal():
            raise InvalidConfig(
                "cache.redis must be a URL such as redis://:password@host:6379/0",
                field="cache.redis",
            )
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        tls = parts.scheme == "rediss"
        return cls(str(parts.hostname), port, user, password, int(database), tls)

    def __str__(self) -> str:
        """Returns the address without the password, for logs."""
        return f"{self.host}:{self.port}"


class RedisConnection:
    """A connection to Redis. `ended` is set once nothing can be sent any more."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        # Commands without a reply, oldest first, with the time when they were sent.
        self._waiting: deque[tuple[asyncio.Future[Reply], float]] = deque()
        self.ended = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, address: RedisAddress) -> RedisConnection:
        """Connects, and waits for a reply, since a frozen Redis accepts connections too."""
        context = ssl.create_default_context() if address.tls else None
        streams = await asyncio.open_connection(address.host, address.port, ssl=context)
        connection = cls(*streams)
        try:
            if address.password:
                user = [address.user] if address.user else []
                await connection.send("AUTH", *user, address.password)
            await connection.send("SELECT", str(address.database))
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def oldest_seconds(self) -> float:
        """Seconds for which the oldest command has waited for its reply; 0 if none waits."""
        return time.monotonic() - self._waiting[0][1] if self._waiting else 0.0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def send(self, *command: bytes | str) -> asyncio.Future[Reply]:
        """Sends a command and returns its reply as a future. Cancelling that does not stop the
        command."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, time.monotonic()))
        words = [word.encode() if isinstance(word, str) else word for word in command]
        self._writer.write(
            b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)
        )
        if self.ended.is_set():
            self._end(ConnectionResetError("the connection has ended"))
        return future

    def close(self) -> None:
        self._reading.cancel()
        self._end(ConnectionResetError("the connection was closed"))

    async def _read(self) -> None:
        try:
            while True:
                reply = await self._reply()
                future, _ = self._waiting.popleft()
                if future.done():
                    continue
                if isinstance(reply, RedisRefused):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError) as error:
            self._end(ConnectionResetError(str(error) or type(error).__name__))

    async def _reply(self) -> Reply | RedisRefused:
        line = (await self._reader.readuntil(b"\r\n"))[:-2]
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            return RedisRefused(rest.decode(errors="replace"))
        if kind == b"+":
            return rest
        number = int(rest)
        if kind == b":":
            return number
        if number < 0:
            return None
        if kind == b"$":
            return (await self._reader.readexactly(number + 2))[:-2]
        return [await self._reply() for _ in range(number)]  # type: ignore[misc]

    def _end(self, error: Exception) -> None:
        self.ended.set()
        self._writer.close()
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: its caller may be gone

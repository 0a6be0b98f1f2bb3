"""Responses in a Redis that all routers share.

No call waits long: a look-up without a reply within LOOKUP_SECONDS fails, and while any reply of
Redis is overdue, further ones fail at once. One task keeps the connection. After a failure is
logged, others are not until there is a new connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from pathlib import Path
from typing import cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from baton.core.errors import InvalidConfig
from baton.core.process import cancel_all
from baton.router.response_cache.cache_store import ResponseKey, StoreFailed
from baton.router.response_cache.redis_connection import (
    RedisAddress,
    RedisConnection,
    RedisRefused,
    Reply,
)

log = logging.getLogger(__name__)

LOOKUP_SECONDS = 0.005
STORE_SECONDS = 1.0
"""A connection without a reply for this long is given up."""
RETRY_SECONDS = 1.0
REPLY_WEIGHT = 1 / 16
"""Weight of the newest reply in reply_seconds."""
MAX_WAITING = 256
"""Commands in flight; more fail at once."""
MAX_VALUE_BYTES = 4 * 2**20
CLEARED_AT_ONCE = 1000
LEAST_SECRET_BYTES = 32

PREFIX = b"baton:response:1:"
"""Begins every response's key; the number is the version of the values' format."""
SEMANTIC_PREFIX = b"baton:semantic:2:"
"""Begins the keys of semantic_cache.py."""
_NONCE_BYTES = 12
_Scanned = tuple[bytes, list[bytes]]


class ResponseCipher:
    """Encrypts values, each bound to its key: it cannot be read, or moved to another key."""

    def __init__(self, secret: bytes) -> None:
        self._cipher = AESGCM(hashlib.sha256(b"baton responses" + secret).digest())

    @classmethod
    def load(cls, path: str) -> ResponseCipher:
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as error:
            raise InvalidConfig(
                f"cannot read {path}: {error.strerror}", field="cache.redis_key"
            ) from error
        if len(secret) < LEAST_SECRET_BYTES:
            raise InvalidConfig(
                f"{path} must have {LEAST_SECRET_BYTES} bytes or more", field="cache.redis_key"
            )
        return cls(secret)

    def encrypt(self, value: bytes, key: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, value, key)

    def decrypt(self, value: bytes, key: bytes) -> bytes:
        try:
            return self._cipher.decrypt(value[:_NONCE_BYTES], value[_NONCE_BYTES:], key)
        except (InvalidTag, ValueError):
            raise StoreFailed("a response cannot be decrypted: was another key used?") from None


class RedisStore:
    used_bytes = 0

    def __init__(self, url: str, seconds: float, cipher: ResponseCipher | None = None) -> None:
        self._address = RedisAddress.parse(url)
        self.lifetime = str(max(1, round(seconds * 1000)))
        self._cipher = cipher
        self.reply_seconds = 0.0
        self._connection: RedisConnection | None = None
        self._failure_logged = False
        self._connecting = asyncio.create_task(self._stay_connected())

    @property
    def replies(self) -> bool:
        """True while connected and without an overdue reply."""
        connection = self._connection
        return connection is not None and connection.oldest_seconds <= LOOKUP_SECONDS

    async def get(self, key: ResponseKey) -> bytes | None:
        name, began = value_name(key), time.monotonic()
        try:
            value = await self.look_up("GET", name)
        finally:
            taken = time.monotonic() - began
            self.reply_seconds += REPLY_WEIGHT * (taken - self.reply_seconds)
        return self.decrypt(value, key) if isinstance(value, bytes) else None

    async def put(self, key: ResponseKey, value: bytes) -> None:
        if len(value) > MAX_VALUE_BYTES:
            raise StoreFailed(f"a response of {len(value)} bytes is too large for Redis")
        name = value_name(key)
        if self._cipher:
            value = self._cipher.encrypt(value, name)
        await self.store("SET", name, value, "PX", self.lifetime)

    def decrypt(self, value: bytes, key: ResponseKey) -> bytes:
        """Returns a stored value as it was passed to `put`."""
        return self._cipher.decrypt(value, value_name(key)) if self._cipher else value

    async def look_up(self, *command: bytes | str) -> Reply:
        """Sends a command with LOOKUP_SECONDS to reply. Raises StoreFailed at once while a reply is
        overdue."""
        if (connection := self._connection) is None or not self.replies:
            raise StoreFailed("Redis does not answer")
        return await self._replied(connection, LOOKUP_SECONDS, *command)

    async def store(self, *command: bytes | str) -> Reply:
        """Sends a command with STORE_SECONDS to reply."""
        if (connection := self._connection) is None:
            raise StoreFailed("Redis does not answer")
        return await self._replied(connection, STORE_SECONDS, *command)

    async def clear(self, tenant: bytes | None) -> int:
        if (connection := self._connection) is None:
            raise StoreFailed(f"the Redis at {self._address} does not answer")
        await self._delete(connection, SEMANTIC_PREFIX + _tenant_part(tenant))
        return await self._delete(connection, PREFIX + _tenant_part(tenant))

    async def _delete(self, connection: RedisConnection, prefix: bytes) -> int:
        """Deletes all keys with a prefix. Returns their number."""
        deleted, cursor = 0, b"0"
        while True:
            scan = ("SCAN", cursor, "MATCH", prefix + b"*", "COUNT", str(CLEARED_AT_ONCE))
            cursor, names = cast(_Scanned, await self._replied(connection, STORE_SECONDS, *scan))
            if names:
                count = await self._replied(connection, STORE_SECONDS, "UNLINK", *names)
                deleted += count if isinstance(count, int) else 0
            if cursor == b"0":
                return deleted

    async def close(self) -> None:
        await cancel_all(self._connecting)

    async def _replied(
        self, connection: RedisConnection, seconds: float, *command: bytes | str
    ) -> Reply:
        if connection.waiting >= MAX_WAITING:
            raise StoreFailed("Redis does not answer")
        reply = connection.send(*command)
        # `wait` instead of a timeout: if this process was late, the reply may be there.
        await asyncio.wait((reply,), timeout=seconds)
        if not reply.done():
            reply.cancel()
            raise self._failed(f"no reply within {seconds * 1000:g} ms")
        try:
            return reply.result()
        except RedisRefused as refused:
            raise self._failed(str(refused)) from refused
        except ConnectionResetError as lost:
            raise self._failed(f"the connection was lost: {lost}") from lost

    def _failed(self, problem: str) -> StoreFailed:
        if not self._failure_logged:
            self._failure_logged = True
            log.warning(
                "the Redis of the response cache at %s failed: %s; answers are computed",
                self._address,
                problem,
            )
        return StoreFailed(problem)

    async def _stay_connected(self) -> None:
        while True:
            try:
                async with asyncio.timeout(STORE_SECONDS):
                    connection = await RedisConnection.open(self._address)
                await self._use(connection)
            except (OSError, RedisRefused) as error:
                self._failed(str(error) or type(error).__name__)
            await asyncio.sleep(RETRY_SECONDS)

    async def _use(self, connection: RedisConnection) -> None:
        if self._failure_logged:
            log.info("the Redis of the response cache at %s answers again", self._address)
        self._failure_logged, self._connection = False, connection
        try:
            await self._watch(connection)
        finally:
            self._connection = None
            connection.close()
        self._failed("the connection was lost")

    async def _watch(self, connection: RedisConnection) -> None:
        """Returns once the connection has ended or a reply is overdue for STORE_SECONDS."""
        while not connection.ended.is_set() and connection.oldest_seconds < STORE_SECONDS:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(connection.ended.wait(), STORE_SECONDS / 4)


def _tenant_part(tenant: bytes | None) -> bytes:
    return b"" if tenant is None else tenant.hex().encode() + b":"


def value_name(key: ResponseKey) -> bytes:
    return PREFIX + _tenant_part(key.tenant) + key.request.hex().encode()


def semantic_name(tenant: bytes, rest: bytes) -> bytes:
    """Returns a key of a tenant's similar questions."""
    return SEMANTIC_PREFIX + _tenant_part(tenant) + rest

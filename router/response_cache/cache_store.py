"""Where cached responses are: keys and bytes, with an age limit."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple, Protocol


class ResponseKey(NamedTuple):
    """Names a response; both parts are digests."""

    tenant: bytes
    request: bytes


class StoreFailed(Exception):
    """A store did not answer in time, refused a value or returned a damaged one."""


class CacheStore(Protocol):
    """Values expire by themselves. Any call may raise StoreFailed, soon."""

    @property
    def used_bytes(self) -> int:
        """In this process."""

    @property
    def reply_seconds(self) -> float:
        """How long `get` takes, of late."""

    async def get(self, key: ResponseKey) -> bytes | None: ...

    async def put(self, key: ResponseKey, value: bytes) -> None: ...

    async def clear(self, tenant: bytes | None) -> int:
        """Deletes one tenant's values, or all. Returns how many."""

    async def close(self) -> None: ...


ENTRY_BYTES = 300
"""What an entry takes beside its value."""


class MemoryStore:
    """In this process. Evicts the least recently used value when the budget is spent."""

    reply_seconds = 0.0

    def __init__(self, budget: int, seconds: float) -> None:
        self._budget = budget
        self._seconds = seconds
        self._values: OrderedDict[ResponseKey, tuple[bytes, float]] = OrderedDict()
        self.used_bytes = 0

    async def get(self, key: ResponseKey) -> bytes | None:
        value, expires = self._values.get(key, (None, 0.0))
        if value is None:
            return None
        if expires < time.monotonic():
            self._drop(key)
            return None
        self._values.move_to_end(key)
        return value

    async def put(self, key: ResponseKey, value: bytes) -> None:
        size = len(value) + ENTRY_BYTES
        if size > self._budget:
            raise StoreFailed(f"a response of {size} bytes exceeds the budget")
        if key in self._values:
            self._drop(key)
        while self.used_bytes + size > self._budget:
            self._drop(next(iter(self._values)))
        self._values[key] = value, time.monotonic() + self._seconds
        self.used_bytes += size

    async def clear(self, tenant: bytes | None) -> int:
        keys = [key for key in self._values if tenant in (None, key.tenant)]
        for key in keys:
            self._drop(key)
        return len(keys)

    async def close(self) -> None:
        self._values.clear()

    def _drop(self, key: ResponseKey) -> None:
        value, _ = self._values.pop(key)
        self.used_bytes -= len(value) + ENTRY_BYTES

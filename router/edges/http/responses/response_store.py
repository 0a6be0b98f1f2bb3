"""Stored responses, which callers get again or continue.

In this router's memory, within a limit: the least recently used is dropped first. Every API key has
its own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from baton.core.errors import InvalidRequest, UnknownRequest
from baton.core.types import Message

STORED_CHARACTERS = 64 * 2**20
"""Of all responses together; each counts with the whole conversation before it."""

_OVERHEAD = 1024
"""Characters that a response counts besides its text."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    body: bytes
    conversation: tuple[Message, ...]  # its input, what was before that, and its output

    @property
    def size(self) -> int:
        messages = (_size(message) for message in self.conversation)
        return _OVERHEAD + len(self.body) + sum(messages)


class RunningResponse(Protocol):
    def current(self) -> bytes:
        """The response so far."""

    def cancel(self) -> bytes:
        """Ends it, and returns what there is."""


class ResponseStore:
    def __init__(self, limit: int = STORED_CHARACTERS) -> None:
        self._limit = limit
        self._size = 0
        # By the API key's name and the response's id; the one used last is the last.
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        # Their calls own them.
        self._running: WeakValueDictionary[tuple[str, str], RunningResponse] = WeakValueDictionary()

    def run(self, owner: str, response_id: str, response: RunningResponse) -> None:
        self._running[owner, response_id] = response

    def keep(self, owner: str, response_id: str, response: StoredResponse) -> None:
        """Replaces the running one."""
        self._running.pop((owner, response_id), None)
        self._stored[owner, response_id] = response
        self._size += response.size
        while self._size > self._limit:
            _, oldest = self._stored.popitem(last=False)
            self._size -= oldest.size

    def conversation(self, owner: str, response_id: str) -> tuple[Message, ...]:
        return self._find(owner, response_id, "previous_response_id").conversation

    def body(self, owner: str, response_id: str) -> bytes:
        running = self._running.get((owner, response_id))
        return running.current() if running else self._find(owner, response_id).body

    def delete(self, owner: str, response_id: str) -> None:
        self._size -= self._find(owner, response_id).size
        del self._stored[owner, response_id]

    def cancel(self, owner: str, response_id: str) -> bytes:
        running = self._running.get((owner, response_id))
        if running:
            return running.cancel()
        self._find(owner, response_id)
        raise InvalidRequest("this response has ended and cannot be cancelled", field="id")

    def _find(self, owner: str, response_id: str, field: str = "id") -> StoredResponse:
        key = owner, response_id
        try:
            self._stored.move_to_end(key)
            return self._stored[key]
        except KeyError:
            raise UnknownRequest(
                f"there is no response {response_id!r} in this router's memory", field=field
            ) from None


def _size(message: Message) -> int:
    calls = sum(len(call.arguments) for call in message.tool_calls)
    return len(message.content) + len(message.reasoning) + calls

"""What one worker's prefix cache holds, as far as its events have told, or soon will.

    nothing known ─reset─▶ known ─number skipped─▶ doubtful ─reset─▶ known …

In doubt, what is known is still used, and later events are still applied; a
reset is asked for, once, and again if none comes for many messages. Whatever
this gets wrong costs a worse placement, never a wrong answer.

A prefix is held page by page from its front, and a cache lets go of it from its
end. So the length of what is held is found by halving, with ten looks for 512
pages. Where a page is missing in the middle, the answer may be too long.

Pages that are kept are not in the worker's pool, but it can bring them back.

A prompt that is sent there is promised: those who ask next find it as if it were
held. The worker computes nothing twice, so they will.

No I/O and no clock.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Container, Sequence

from baton.v1 import worker_pb2 as pb

ASK_AGAIN_AFTER = 100
"""Messages after which a reset that was asked for counts as lost."""


class HeldPages:
    def __init__(self) -> None:
        # A dict of bytes and None is not walked by the garbage collector; a set would be, and a
        # million keys take it a tenth of a second.
        self._keys: dict[bytes, None] = {}
        self._kept: dict[bytes, None] = {}
        self._promised: dict[bytes, int] = {}  # and to how many requests
        self._number: int | None = None  # of the last message; None before the first
        self._asked_at: int | None = None  # while a reset is awaited

    def __len__(self) -> int:
        return len(self._keys) + len(self._kept)

    def take(self, events: pb.CacheEvents) -> bool:
        """Notes what changed. Whether the worker is to be asked for a reset."""
        if events.reset:
            self._keys = dict.fromkeys(events.stored)
            self._kept = dict.fromkeys(events.kept)
            self._number, self._asked_at = events.number, None
            return False
        if self._number is not None and events.number <= self._number:
            return False  # heard before, or overtaken by a reset
        is_next = self._number is not None and events.number == self._number + 1
        self._number = events.number
        self._move(events.stored, self._keys, self._kept)
        self._move(events.kept, self._kept, self._keys)
        for key in events.evicted:
            self._keys.pop(key, None)
            self._kept.pop(key, None)
        return self._must_ask(events.number, missed=not is_next)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many pages at the front of a chain are held, those that are kept included."""
        if not self._kept:
            return self.near(keys)
        either: ChainMap[bytes, None] = ChainMap(self._keys, self._kept)
        return max(self.near(keys), _leading(keys, either))

    @property
    def keeps(self) -> bool:
        """Whether anything would have to be brought back."""
        return bool(self._kept)

    def near(self, keys: Sequence[bytes]) -> int:
        """How many pages at the front of a chain need not be brought back."""
        held = _leading(keys, self._keys)
        return max(held, _leading(keys, self._promised)) if self._promised else held

    def promise(self, keys: Sequence[bytes]) -> None:
        """A prompt with these pages is sent there."""
        for key in keys:
            self._promised[key] = self._promised.get(key, 0) + 1

    def settle(self, keys: Sequence[bytes]) -> None:
        """The request is over: events have told what became of its prompt."""
        for key in keys:
            count = self._promised.pop(key) - 1
            if count:
                self._promised[key] = count

    @staticmethod
    def _move(keys: Collection[bytes], to: dict[bytes, None], out_of: dict[bytes, None]) -> None:
        to.update(dict.fromkeys(keys))
        if out_of:
            for key in keys:
                out_of.pop(key, None)

    def _must_ask(self, number: int, *, missed: bool) -> bool:
        asked = self._asked_at
        ask = missed if asked is None else number - asked >= ASK_AGAIN_AFTER
        if ask:
            self._asked_at = number
        return ask


def _leading(keys: Sequence[bytes], known: Container[bytes]) -> int:
    if not keys or keys[0] not in known:
        return 0
    if keys[-1] in known:
        return len(keys)
    present, absent = 0, len(keys) - 1
    while absent - present > 1:
        middle = (present + absent) // 2
        if keys[middle] in known:
            present = middle
        else:
            absent = middle
    return absent

"""A router's view of one worker's prefix cache and prompt queue. Pure: no I/O.

The cache index follows a worker's cache events, which are numbered:

    nothing known ─reset─▶ known ─number skipped─▶ doubtful ─reset─▶ known …

A doubtful index is still used and updated; a reset is requested once, and again if none comes for
many messages. A wrong entry costs a worse placement, never a wrong answer.
"""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass

from baton.v1 import worker_pb2 as pb

ASK_AGAIN_AFTER = 100
"""Messages after which a requested reset counts as lost."""


class CacheIndex:
    """The keys of one worker's cached pages: in its pool, in its second tier, or pending.

    Pages of a prompt that is on its way to the worker are pending. They count as cached: the
    worker computes no page twice.
    """

    def __init__(self) -> None:
        # Dicts of bytes and None, since the garbage collector does not walk these: a set of a
        # million keys takes it 0.1 s.
        self._pool: dict[bytes, None] = {}
        self._saved: dict[bytes, None] = {}  # only in the second tier
        self._pending: dict[bytes, int] = {}  # number of requests by key
        self._number: int | None = None  # of the last message; None before the first
        self._asked_at: int | None = None  # message at which a reset was requested, until it comes
        self.windowed = False  # all layers have windows: only a prefix's last pages are held

    def __len__(self) -> int:
        return len(self._pool) + len(self._saved)

    def apply(self, events: pb.CacheEvents) -> bool:
        """Applies a message. Returns True if a reset is to be requested from the worker."""
        if events.reset:
            self._pool = dict.fromkeys(events.stored)
            self._saved = dict.fromkeys(events.kept)
            self._number, self._asked_at = events.number, None
            return False
        if self._number is not None and events.number <= self._number:
            return False  # a duplicate, or overtaken by a reset
        is_next = self._number is not None and events.number == self._number + 1
        self._number = events.number
        _move(events.stored, self._pool, self._saved)
        _move(events.kept, self._saved, self._pool)
        for key in events.evicted:
            self._pool.pop(key, None)
            self._saved.pop(key, None)
        return self._must_ask(events.number, missed=not is_next)

    def leading(self, keys: Sequence[bytes]) -> int:
        """Counts the leading pages of a chain that are held anywhere."""
        if not self._saved:
            return self.leading_in_pool(keys)
        either: ChainMap[bytes, None] = ChainMap(self._pool, self._saved)
        return max(self.leading_in_pool(keys), self._leading(keys, either))

    def leading_in_pool(self, keys: Sequence[bytes]) -> int:
        """Counts the leading pages of a chain that need no restore."""
        held = self._leading(keys, self._pool)
        return max(held, self._leading(keys, self._pending)) if self._pending else held

    def _leading(self, keys: Sequence[bytes], known: Container[bytes]) -> int:
        if self.windowed:
            counts = range(len(keys), 0, -1)
            return next((count for count in counts if keys[count - 1] in known), 0)
        return _leading(keys, known)

    @property
    def has_saved(self) -> bool:
        return bool(self._saved)

    def add_pending(self, keys: Sequence[bytes]) -> None:
        """Adds the pages of a prompt that is sent to the worker."""
        for key in keys:
            self._pending[key] = self._pending.get(key, 0) + 1

    def remove_pending(self, keys: Sequence[bytes]) -> None:
        """Removes the pending pages of a request that has ended."""
        for key in keys:
            count = self._pending.pop(key) - 1
            if count:
                self._pending[key] = count

    def _must_ask(self, number: int, *, missed: bool) -> bool:
        asked = self._asked_at
        ask = missed if asked is None else number - asked >= ASK_AGAIN_AFTER
        if ask:
            self._asked_at = number
        return ask


def _move(keys: Collection[bytes], to: dict[bytes, None], out_of: dict[bytes, None]) -> None:
    to.update(dict.fromkeys(keys))
    if out_of:
        for key in keys:
            out_of.pop(key, None)


def _leading(keys: Sequence[bytes], known: Container[bytes]) -> int:
    """Bisects, since caches evict a prefix from its end: ten lookups for 512 pages. If a page is
    missing in the middle, the result may be too large."""
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


@dataclass(eq=False, slots=True)
class QueuedPrompt:
    """A prompt that was sent to a worker and is not computed yet."""

    tokens: int
    cached_tokens: int
    reports: int = 0  # since it was sent

    @property
    def uncached_tokens(self) -> int:
        return self.tokens - self.cached_tokens


class PromptQueue:
    """Estimates the prompt tokens that a worker has yet to compute, from two sources.

    The router knows which prompts it has sent, how much of them is cached, and which have their
    first token. The worker's periodic report includes other routers' prompts and the progress of
    the current one, but counts cached tokens until their prompt starts. Two reports after it was
    sent, a prompt is included: the first report may be older than the prompt.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prompts: set[QueuedPrompt] = set()
        self._reported = 0
        self._changed = False  # since the last report
        self.was_empty = True  # between the last two reports
        self._busy_seconds = 0.0
        self._counted_until = clock()

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, tokens: int, cached_tokens: int) -> QueuedPrompt:
        prompt = QueuedPrompt(tokens, cached_tokens)
        self._count()
        self._prompts.add(prompt)
        self._changed = True
        return prompt

    def remove(self, prompt: QueuedPrompt) -> None:
        """Removes a prompt that is computed or given up."""
        self._count()
        self._prompts.discard(prompt)
        self._changed = True

    def report(self, queued_tokens: int) -> None:
        """Applies the worker's report."""
        self._count()
        self._reported = queued_tokens
        self.was_empty = not (self._prompts or self._changed)
        self._changed = False
        for prompt in self._prompts:
            prompt.reports += 1

    @property
    def busy_seconds(self) -> float:
        """Total seconds during which there was a prompt."""
        self._count()
        return self._busy_seconds

    @property
    def queued_tokens(self) -> int:
        ours = sum(prompt.uncached_tokens for prompt in self._prompts)
        others = max(0, self._reported - sum(prompt.tokens for prompt in self._prompts))
        new = sum(prompt.uncached_tokens for prompt in self._prompts if prompt.reports < 2)
        return min(ours + others, self._reported + new)

    def _count(self) -> None:
        now = self._clock()
        if self._prompts or self._reported:
            self._busy_seconds += now - self._counted_until
        self._counted_until = now

"""How many prompt tokens a worker has yet to compute, from two sides.

The router knows what it has sent, how much of that is cached, and what has come
to its token #1; the worker's report knows what other routers sent and how far a
prompt in progress is, but counts cached tokens until it starts with them, and
comes now and then. A prompt is in a report when two have come since it was sent:
the first may have been made before the prompt was taken from the inbox.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Prompt:
    """One that was sent and has not been read."""

    tokens: int
    cached_tokens: int
    reports: int = 0  # since it was sent

    @property
    def uncached_tokens(self) -> int:
        return self.tokens - self.cached_tokens


class PromptQueue:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prompts: set[Prompt] = set()
        self._reported = 0
        self._changed = False  # since the last report
        # Whether there was no prompt between the last two reports.
        self.was_empty = True
        self._busy_seconds = 0.0
        self._counted = clock()  # up to then

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, tokens: int, cached_tokens: int) -> Prompt:
        prompt = Prompt(tokens, cached_tokens)
        self._count()
        self._prompts.add(prompt)
        self._changed = True
        return prompt

    def remove(self, prompt: Prompt) -> None:
        """It has been read, or never will be."""
        self._count()
        self._prompts.discard(prompt)
        self._changed = True

    def report(self, queued_tokens: int) -> None:
        """The worker says so."""
        self._count()
        self._reported = queued_tokens
        self.was_empty = not (self._prompts or self._changed)
        self._changed = False
        for prompt in self._prompts:
            prompt.reports += 1

    @property
    def busy_seconds(self) -> float:
        """In how many seconds, all in all, there was a prompt."""
        self._count()
        return self._busy_seconds

    def _count(self) -> None:
        now = self._clock()
        if self._prompts or self._reported:
            self._busy_seconds += now - self._counted
        self._counted = now

    @property
    def queued_tokens(self) -> int:
        ours = sum(prompt.uncached_tokens for prompt in self._prompts)
        others = max(0, self._reported - sum(prompt.tokens for prompt in self._prompts))
        new = sum(prompt.uncached_tokens for prompt in self._prompts if prompt.reports < 2)
        return min(ours + others, self._reported + new)

"""One request while an engine works on it: its tokens, its pages and what it waits for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.core.types import FinishReason, Logprobs, Work
from baton.engine.page_pool import Lease, PagePool
from baton.engine.prefix_cache import KeyChain


class Guide(Protocol):
    """Knows which tokens may come next in one answer."""

    def follow(self, tokens: list[int]) -> None:
        """The answer goes on with these."""

    def mask(self) -> npt.NDArray[np.uint8]:
        """One number a token: 0 where it may not come next."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request while an engine works on it.

    tokens holds the prompt and what has been generated. K/V of
    tokens[:computed] are in the lease's pages; the rest must still be run.
    """

    work: Work
    lease: Lease
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    # Its place among the requests of its worker: older is smaller.
    order: int = 0
    # Tokens that steps under way will sample: they count as there, though only
    # the device knows them yet.
    expected: int = 0
    # Pages that the second tier was asked for.
    restored: int = 0
    # The keys of its pages; they have none where nothing is cached.
    chain: KeyChain = field(default_factory=KeyChain)
    # Where only some tokens may come next.
    guide: Guide | None = None
    # Where that is asked for: how likely the prompt's tokens were, from its second on.
    prompt_scores: list[Logprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.work.prompt_tokens)

    @property
    def prompt_length(self) -> int:
        """Without what earlier attempts answered, which counts as generated."""
        return len(self.work.prompt_tokens) - self.work.answer_tokens

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) + self.expected - self.computed

    @property
    def planned_out(self) -> bool:
        """Whether no step can be planned before the host has seen what those under way sample."""
        if not self.expected:
            return False
        last = self.generated + self.expected >= self.work.max_tokens
        return last or self.work.sampling.penalizes or self.guide is not None

    def set_guide(self, guide: Guide | None) -> None:
        """From now on only what the guide allows is sampled. It has seen no token yet."""
        self.guide = guide
        if guide is not None:
            guide.follow(self.tokens[self.prompt_length :])

    @property
    def cached_tokens(self) -> int:
        """Of its tokens, how many at the front were found in the cache."""
        return self.lease.found * self.chain.page_size

    @property
    def restored_tokens(self) -> int:
        """Of these, how many the second tier had."""
        return min(self.restored, self.lease.found) * self.chain.page_size

    def settle(self, computed: int) -> None:
        """K/V of tokens[:computed] are there for good: pages that they fill may be shared."""
        if computed // self.chain.page_size > self.lease.named:
            self.lease.name(self.chain.keys(self.tokens, computed))

    def add_prompt_score(self, position: int, logprobs: Logprobs) -> None:
        """How likely the token behind `position` was. What is computed again is known."""
        if position == len(self.prompt_scores):
            self.prompt_scores.append(logprobs)

    def will_name(self, place: int, key: bytes) -> bool:
        """Whether its page number `place` is still to be computed, and to have this key."""
        return place >= self.lease.named and self.chain.names(place, key)

    def append(self, token: int) -> FinishReason | None:
        """Adds a generated token; says whether it is the last."""
        self.tokens.append(token)
        finish = self.work.finish_reason(token, self.generated)
        if self.guide is not None and finish is None:
            self.guide.follow([token])
        return finish


def next_page_pending(keys: list[bytes], pool: PagePool, sequences: Iterable[Sequence]) -> bool:
    """Whether the first page that the cache lacks is being restored, or computed for one of
    `sequences`."""
    place = len(pool.cache.find(keys))
    if place == len(keys):
        return False
    key = keys[place]
    return pool.lower.is_restoring(key) or any(each.will_name(place, key) for each in sequences)

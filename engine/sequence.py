"""One request while an engine works on it: its tokens, its pages, and what is sampled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from baton.core.page_keys import KeyChain
from baton.core.types import FinishReason, Logprobs, Work
from baton.engine.grammar import TokenGuide
from baton.engine.page_pool import Lease, PagePool
from baton.engine.pooled_rows import PooledRows
from baton.engine.prompt_lookup import PromptLookup


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` holds the prompt and the generated tokens. Keys and values of tokens[:computed]
    are in the lease's pages; the rest must still be run. Workers add fields in a subclass."""

    work: Work
    lease: Lease
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    order: int = 0  # among its worker's requests: older is smaller
    expected: int = 0  # tokens that steps in flight will sample; only the device knows them yet
    restored: int = 0  # pages requested from the second tier
    chain: KeyChain = field(default_factory=KeyChain)  # without keys if nothing is cached
    retained: bool = False  # its prompt's pages have been retained
    guide: TokenGuide | None = None
    lookup: PromptLookup | None = None  # if its tokens are guessed
    guesses: list[int] = field(default_factory=list)  # run by the next step that samples
    assumed: int = 0  # guesses that count as drawn; see `ahead`
    prompt_scores: list[Logprobs] = field(default_factory=list)  # from the second token on
    pooled: PooledRows | None = None  # if the prompt's embedding is wanted

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.work.prompt_tokens)
        if self.work.pooling:
            self.pooled = PooledRows()

    @classmethod
    def queued(cls, work: Work, pool: PagePool) -> Self:
        """A sequence that has no pages yet."""
        lease = pool.lease([])
        lease.release()
        return cls(work, lease, chain=pool.chain(work.cache_name, work.adapter_digest))

    @property
    def keys_to_find(self) -> list[bytes]:
        """Keys of its pages that a cache may provide."""
        return self.chain.to_find(self.tokens)

    @property
    def prompt_length(self) -> int:
        """The prompt's tokens, without those of earlier attempts, which count as generated."""
        return len(self.work.prompt_tokens) - self.work.answer_tokens

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) + self.expected - self.computed

    @property
    def planned_out(self) -> bool:
        """True if no further step can be planned before those in flight have settled."""
        if not self.expected:
            return False
        last = self.generated + self.expected >= self.work.max_tokens
        return last or self.guessing or self.needs_known_tokens

    @property
    def needs_known_tokens(self) -> bool:
        """True if the host must know all tokens before the next is sampled."""
        return self.work.sampling.looks_back or self.guide is not None

    @property
    def guessing(self) -> bool:
        """True if a step in flight runs guesses: only the device knows yet how many are right."""
        return self.expected > 0 and bool(self.guesses)

    def samples(self, count: int) -> bool:
        """True if a step that runs its next `count` tokens samples another one."""
        return count == self.uncomputed

    def draws(self, count: int) -> int:
        """The number of tokens that such a step samples, with one after each guess."""
        return 1 + len(self.guesses) if self.samples(count) else 0

    def ahead(self, count: int) -> Sequence:
        """The sequence as if its first `count` guesses were drawn; for sampling only."""
        if not count:
            return self
        known, expected = self.tokens, count
        if self.work.sampling.looks_back:  # otherwise the tokens do not matter
            known, expected = [*known, *self.guesses[:count]], 0
        return Sequence(
            self.work, self.lease, known, expected=expected, guide=self.guide, assumed=count
        )

    def take_guesses(self) -> list[int]:
        """Removes and returns the guesses that a step has run."""
        guesses, self.guesses = self.guesses, []
        return guesses

    def needed(self, count: int) -> range:
        """The positions among its next `count` that the last layer computes besides those that
        sample: for log probabilities of the prompt, or for its embedding."""
        if not self.work.needs_all_rows:
            return range(0)
        start = max(self.computed, self.pooled.count if self.pooled else len(self.prompt_scores))
        return range(start, min(self.computed + count, self.prompt_length - 1))

    def cover(self, count: int, pool: PagePool) -> int:
        """Adds pages for its next `count` tokens, or for fewer if there is little room. Returns
        the number of these tokens that have pages now."""
        count = min(count, self.uncomputed)
        while count:
            needed = pool.pages_for(self.computed + count)
            missing = self.lease.missing(needed)
            if missing <= 0:  # as in most steps
                return count
            if missing <= pool.free:
                self.lease.cover(needed)
                return count
            count //= 2
        return 0

    def launched(self, count: int) -> None:
        """Advances to the state after a step that is now in flight."""
        self.expected += self.samples(count)
        self.computed += count

    def set_guide(self, guide: TokenGuide | None) -> None:
        """Restricts sampling to what the guide allows. It must not have seen a token yet."""
        self.guide = guide
        if guide is not None:
            guide.follow(self.tokens[self.prompt_length :])

    @property
    def cached_tokens(self) -> int:
        """Tokens at the front that were found in the cache."""
        return self.lease.found * self.chain.page_size

    @property
    def restored_tokens(self) -> int:
        """The cached tokens that came from the second tier."""
        return min(self.restored, self.lease.found) * self.chain.page_size

    def settle(self, computed: int) -> None:
        """Marks keys and values of tokens[:computed] as final: full pages may be shared, and pages
        that no later token sees are returned. Once the prompt is computed, its pages are retained
        if the request asks for it."""
        if computed // self.chain.page_size > self.lease.named:
            self.lease.name(self.chain.keys(self.tokens, computed))
            self.lease.advance(computed)
        if self.work.retain_seconds and not self.retained and computed >= self.prompt_length:
            self.retained = True
            prompt = self.chain.keys(self.tokens, self.prompt_length)
            self.lease.retain(prompt, self.work.retain_seconds)

    def add_prompt_score(self, position: int, logprobs: Logprobs) -> None:
        """Scores the token after `position`; ignored when computed again."""
        if position == len(self.prompt_scores):
            self.prompt_scores.append(logprobs)

    def will_name(self, place: int, key: bytes) -> bool:
        """True if its page number `place` is still to be computed, and will have this key."""
        return place >= self.lease.named and self.chain.names(place, key)

    def append(self, *tokens: int) -> FinishReason | None:
        """Adds generated tokens; returns the finish reason if the last one ends the answer."""
        self.tokens += tokens
        finish = self.work.finish_reason(tokens[-1], self.generated)
        if self.guide is not None and finish is None:
            self.guide.follow(list(tokens))
        return finish


def next_page_pending(keys: list[bytes], pool: PagePool, sequences: Iterable[Sequence]) -> bool:
    """True if the first page that the cache lacks is being restored, or computed for one of
    `sequences`."""
    place = pool.find(keys)
    if place == len(keys):
        return False
    key = keys[place]
    if pool.second_tier.is_restoring(key):
        return True
    return any(each.will_name(place, key) for each in sequences)

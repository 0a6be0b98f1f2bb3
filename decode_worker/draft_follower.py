"""The draft model's state of one request: its sequence there, and how its guesses did."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from baton.engine.acceptance import Acceptance
from baton.engine.sequence import Sequence

KINDS = ((0.3, 0.3), (0.6, 0.5), (0.85, 0.75), (0.97, 0.9), (2.0, 0.97))
"""By the probability that the draft gives its guess, up to these: the share of right guesses that
is assumed at first."""
ANY, ANY_SHARE = len(KINDS), 0.7
"""The kind of a guess that is not made yet."""


@dataclass(slots=True, eq=False)
class Follower:
    """The draft's state of a request."""

    sequence: Sequence  # with the draft's pages; its last tokens may be guesses
    acceptance: Acceptance
    known: int  # tokens that are the request's
    kinds: list[int] = field(default_factory=list)  # of the guesses behind them
    chances: list[float] = field(default_factory=list)
    most: int = 0  # guesses that are wanted in this step
    run: int = 0  # of its guesses, those that the main model runs
    failed: bool = False  # the draft cannot compute it

    @property
    def behind(self) -> int:
        """Tokens that the draft has not computed."""
        return self.sequence.uncomputed

    def missed(self, request: Sequence) -> int:
        """Tokens that it will be behind by, once those in flight have come."""
        return len(request.tokens) + request.expected - self.sequence.computed

    @property
    def guesses(self) -> list[int]:
        return self.sequence.tokens[self.known :]

    @property
    def chance(self) -> float:
        """That another guess and all before it, known or in flight, are right."""
        before = self.chances[-1] if self.chances else 1.0
        return before * self.acceptance.share(ANY) ** (1 + self.sequence.expected)

    def follow(self, tokens: list[int]) -> int:
        """Takes over the request's tokens. Returns how many guesses were right."""
        right = 0
        for kind, guess, token in zip(self.kinds, self.guesses, tokens[self.known :], strict=False):
            self.acceptance.note(kind, right=guess == token)
            self.acceptance.note(ANY, right=guess == token)
            if guess != token:
                break
            right += 1
        computed = min(self.sequence.computed, self.known + right, len(tokens) - 1)
        self.sequence.tokens[self.known :] = tokens[self.known :]
        self.sequence.computed = computed
        self.known, self.kinds, self.chances, self.run = len(tokens), [], [], 0
        self.sequence.settle(computed)
        return right

    def add(self, token: int, logprob: float) -> None:
        probability = math.exp(logprob)
        kind = next(kind for kind, (most, _) in enumerate(KINDS) if probability < most)
        before = self.chances[-1] if self.chances else 1.0
        self.chances.append(before * self.acceptance.share(kind))
        self.kinds.append(kind)
        self.sequence.tokens.append(token)

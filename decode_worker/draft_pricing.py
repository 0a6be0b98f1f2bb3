"""The draft model's state of each request, and whether its guesses pay, judged by the cost of
rounds and the share of right guesses.

A round pays if it is predicted to raise the step's tokens per second. Computing a prompt pays if
guesses are predicted to save more time in the rest of the answer. What is not predicted to pay is
tried now and then, within a budget of seconds (the account). Its income is what guesses have saved
and a small share of all time, which falls with the share of right guesses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.core.online_fit import OnlineFit
from baton.engine.acceptance import Acceptance
from baton.engine.sequence import Sequence

KINDS = ((0.3, 0.3), (0.6, 0.5), (0.85, 0.75), (0.97, 0.9), (2.0, 0.97))
"""Kinds of guesses: the upper bound of the draft's probability of such a guess, and the share of
right guesses assumed at first."""
ANY, ANY_SHARE = len(KINDS), 0.7
"""The kind of a guess that has not been made yet, and its share."""

CPU_SECONDS, GPU_SECONDS = (1e-4, 3e-3, 3e-4, 2e-4), (1e-3, 1e-3, 1e-5, 5e-6)
"""Costs assumed until they are measured: a fixed cost of all rounds before a step, then of a round,
of a row, of a token in a longer chunk."""
MEMORY, MEASURED_WEIGHT = 200.0, 20.0

MOST_SAVED = 0.5
"""The prompt may cost this share of what guesses may save in its answer, which may end early."""

ENOUGH = 12
"""After this many compared guesses the share of right ones counts as known, and the account may be
overdrawn."""

CLEARLY = 0.05
"""The share of time that guesses must be predicted to save while the account is in debt: then they
have saved less than was predicted."""

TRIAL_SHARE, LEAST_SHARE = 0.02, 0.25
"""The share of time for trials if all guesses were right, and its factor if none was."""
FIRST_CREDIT, MOST_CREDIT, MOST_DEBT = 0.05, 2.0, 10.0
"""Seconds on the account."""


@dataclass(slots=True, eq=False)
class Follower:
    """The draft's state of a request."""

    sequence: Sequence  # with the draft's pages; its last tokens may be guesses
    acceptance: Acceptance
    known: int  # tokens of the request; those after them are guesses
    kinds: list[int] = field(default_factory=list)  # of the guesses
    chances: list[float] = field(default_factory=list)
    most: int = 0  # guesses wanted in this step
    run: int = 0  # guesses that the main model runs
    failed: bool = False  # the draft cannot compute the request

    @property
    def behind(self) -> int:
        """Tokens that the draft has not computed."""
        return self.sequence.uncomputed

    @property
    def guesses(self) -> list[int]:
        return self.sequence.tokens[self.known :]

    @property
    def chance(self) -> float:
        """Probability that the next guess and all before it, known or in flight, are right."""
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


class Pace(NamedTuple):
    """The speed of a step without the draft's guesses."""

    tokens: float
    seconds: float
    row: float  # seconds of one more row
    wait: float = 0.0  # seconds that the device waits for a step with guesses

    @property
    def token(self) -> float:
        """Seconds of a token, which a right guess saves."""
        return self.seconds / max(self.tokens, 1.0)


class Pricing:
    def __init__(self, cost: OnlineFit) -> None:
        self.seen = Acceptance([*(share for _, share in KINDS), ANY_SHARE])
        self._compared = 0  # guesses
        self._cost = cost
        self._account = FIRST_CREDIT

    @property
    def can_try(self) -> bool:
        """True if the account has seconds for a trial."""
        return self._account > 0.0

    @property
    def can_invest(self) -> bool:
        """True if prompts that are predicted to pay may be computed; on credit once the share of
        right guesses is known."""
        return self._account + (FIRST_CREDIT if self._compared >= ENOUGH else 0.0) > 0.0

    def trust_measurements(self) -> None:
        """Trusts what has been measured, and resets the account."""
        self._cost = OnlineFit(self._cost.coefficients, MEMORY, MEASURED_WEIGHT)
        self._account = FIRST_CREDIT

    def earn(self, seconds: float) -> None:
        """Adds the share for trials of a main model's step, which took `seconds`."""
        self.pay(-TRIAL_SHARE * max(self.seen.share(ANY), LEAST_SHARE) * seconds)

    def note_guesses(self, compared: int, saved: float) -> None:
        """Adds the `saved` seconds of the right ones among `compared` guesses."""
        self._compared += compared
        self.pay(-saved)

    def note_rounds(self, features: Values[float], seconds: float) -> None:
        """Fits and pays the cost of the rounds before a step. `features`: 1, the rounds, their
        rows of one token, their tokens in longer chunks."""
        self._cost.note(features, seconds)
        self.pay(self._cost.predict(features))

    def pay(self, seconds: float) -> None:
        self._account = min(max(self._account - seconds, -MOST_DEBT), MOST_CREDIT)

    def choose(self, chances: dict[Sequence, float], pace: Pace) -> tuple[list[Sequence], Pace]:
        """Returns the requests for which another guess pays, likeliest first, and the pace with
        these guesses."""
        _, step, row, _ = self._cost.coefficients
        price, gained, chosen = step, 0.0, []
        for request, chance in sorted(chances.items(), key=lambda each: -each[1]):
            if chance * pace.seconds <= pace.tokens * (row + pace.row):
                break
            chosen.append(request)
            price, gained = price + row + pace.row, gained + chance
        if gained * pace.seconds <= pace.tokens * price:
            return [], pace
        return chosen, pace._replace(tokens=pace.tokens + gained, seconds=pace.seconds + price)

    def choose_trial(self, chances: dict[Sequence, float], pace: Pace) -> list[Sequence]:
        """Returns the likeliest requests for a trial: at least one, and as many as cost no more
        than the round itself."""
        _, step, row, _ = self._cost.coefficients
        most = max(1, int(step / (row + pace.row)))
        return sorted(chances, key=chances.__getitem__, reverse=True)[:most]

    def with_overhead(self, pace: Pace) -> Pace:
        """Adds the wait and the fixed cost of rounds, independent of their number."""
        return pace._replace(seconds=pace.seconds + pace.wait + self._cost.coefficients[0])

    def pays(self, saved: float) -> bool:
        """True if guesses that are predicted to save this share of time pay."""
        return saved > (0.0 if self.can_try else CLEARLY)

    def saved_share(
        self, shares: dict[Sequence, float], depths: dict[Sequence, int], pace: Pace
    ) -> float:
        """Predicts the share of a step's time that rounds save, as many as pay, before any guess
        is made."""
        chances, reached = dict(shares), self.with_overhead(pace)
        for depth in range(1, max(depths.values(), default=0) + 1):
            chosen, reached = self.choose(chances, reached)
            chances = {
                each: chances[each] * shares[each] for each in chosen if depths[each] > depth
            }
            if not chances:
                break
        return 1.0 - reached.seconds / (reached.tokens * pace.token)

    def choose_prompts(
        self, prompts: dict[Sequence, int], saved: float, token: float
    ) -> list[Sequence]:
        """Returns the requests whose prompts pay if guesses save the share `saved` of an answer's
        time, at `token` seconds per token. `prompts` has the length of each prompt. Until the share
        of right guesses is known, the account limits their number."""
        limit = math.inf if self._compared >= ENOUGH else self._account
        chosen, owed = [], 0.0
        for request, tokens in prompts.items():
            price = self._cost.coefficients[3] * tokens
            left = request.work.max_tokens - request.generated
            if owed <= limit and price < MOST_SAVED * saved * token * left:
                chosen.append(request)
                owed += price
        return chosen

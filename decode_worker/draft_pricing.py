"""Whether a draft's guesses pay: by what its rounds cost and how many guesses were right.

A round pays where it is predicted to bring more tokens a second than the step has without it.
Computing a prompt pays where guesses are predicted to save more than that in the rest of the
answer. What is not predicted to pay is tried now and then, and paid for out of an account: it has
what guesses have saved, and a small share of all time, which falls with the share of right guesses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Values
from typing import NamedTuple

from baton.core.online_fit import OnlineFit
from baton.decode_worker.draft_follower import ANY, ANY_SHARE, KINDS
from baton.engine.acceptance import Acceptance
from baton.engine.sequence import Sequence

CPU_SECONDS, GPU_SECONDS = (1e-4, 3e-3, 3e-4, 2e-4), (1e-3, 1e-3, 1e-5, 5e-6)
"""Assumed until the draft's steps have been measured: all rounds before a step together, a round, a
row, a token of a longer chunk."""
MEMORY, MEASURED_WEIGHT = 200.0, 20.0

MOST_SAVED = 0.5
"""The share of what guesses may save in an answer that its prompt may cost: it may end early."""

ENOUGH = 12
"""Guesses after which the share of right ones is known: more may be spent than is on the
account."""

CLEARLY = 0.05
"""The share of time that guesses must be predicted to save while the account is in debt: then they
have saved less than predicted."""

TRIAL_SHARE, LEAST_SHARE = 0.02, 0.25
"""The share of time that what does not pay may take, if all guesses were right; and what it is
multiplied by, if none was."""
FIRST_CREDIT, MOST_CREDIT, MOST_DEBT = 0.05, 2.0, 10.0
"""Seconds of the account."""


class Pace(NamedTuple):
    """Of a step without the draft's guesses."""

    tokens: float
    seconds: float
    row: float  # seconds of one row more
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
    def tries(self) -> bool:
        """Whether there are seconds for what does not pay."""
        return self._account > 0.0

    @property
    def invests(self) -> bool:
        """Whether prompts may be computed, if that is predicted to pay: on credit, where the share
        of right guesses is known."""
        return self._account + (FIRST_CREDIT if self._compared >= ENOUGH else 0.0) > 0.0

    def measured(self) -> None:
        """Takes what has been measured for granted, and nothing as spent."""
        self._cost = OnlineFit(self._cost.coefficients, MEMORY, MEASURED_WEIGHT)
        self._account = FIRST_CREDIT

    def earn(self, seconds: float) -> None:
        """A step of the main model took `seconds`."""
        self.pay(-TRIAL_SHARE * max(self.seen.share(ANY), LEAST_SHARE) * seconds)

    def note_guesses(self, compared: int, saved: float) -> None:
        """So many were compared with tokens, and the right ones saved so many seconds."""
        self._compared += compared
        self.pay(-saved)

    def note_rounds(self, features: Values[float], seconds: float) -> None:
        """Of the rounds before a step: 1, their number, their rows of one token, and their tokens
        of longer chunks."""
        self._cost.note(features, seconds)
        self.pay(self._cost.predict(features))

    def pay(self, seconds: float) -> None:
        self._account = min(max(self._account - seconds, -MOST_DEBT), MOST_CREDIT)

    def worth(self, chances: dict[Sequence, float], pace: Pace) -> tuple[list[Sequence], Pace]:
        """The requests, the likeliest first, of which another guess pays; and the pace with
        these."""
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

    def tried(self, chances: dict[Sequence, float], pace: Pace) -> list[Sequence]:
        """The likeliest, as many as cost no more than a round without any, but one at least."""
        _, step, row, _ = self._cost.coefficients
        most = max(1, int(step / (row + pace.row)))
        return sorted(chances, key=chances.__getitem__, reverse=True)[:most]

    def begun(self, pace: Pace) -> Pace:
        """The pace with what rounds cost besides, however many follow."""
        return pace._replace(seconds=pace.seconds + pace.wait + self._cost.coefficients[0])

    def pays(self, saved: float) -> bool:
        """Whether guesses do that are predicted to save this share of time."""
        return saved > (0.0 if self.tries else CLEARLY)

    def saves(
        self, shares: dict[Sequence, float], depths: dict[Sequence, int], pace: Pace
    ) -> float:
        """The share of a step's time that rounds save, as many as pay; before any guess is
        made."""
        chances, reached = dict(shares), self.begun(pace)
        for depth in range(1, max(depths.values(), default=0) + 1):
            chosen, reached = self.worth(chances, reached)
            chances = {
                each: chances[each] * shares[each] for each in chosen if depths[each] > depth
            }
            if not chances:
                break
        return 1.0 - reached.seconds / (reached.tokens * pace.token)

    def affordable(
        self, prompts: dict[Sequence, int], saved: float, token: float
    ) -> list[Sequence]:
        """The requests whose prompts, of so many tokens, pay if guesses save a share `saved` of an
        answer's time, `token` seconds a token. Until that share is known, as many as the account
        has seconds for."""
        limit = math.inf if self._compared >= ENOUGH else self._account
        chosen, owed = [], 0.0
        for request, tokens in prompts.items():
            price = self._cost.coefficients[3] * tokens
            left = request.work.max_tokens - request.generated
            if owed <= limit and price < MOST_SAVED * saved * token * left:
                chosen.append(request)
                owed += price
        return chosen

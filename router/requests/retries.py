"""One request over all of its attempts.

    begin ─▶ attempt ─▶ finished
      ▲         │
      └─ retry ─┴─▶ failed: the request's own fault, or too many deaths or attempts

What has been emitted stays emitted: the next attempt reads prompt and answer
together and goes on behind them. Sampling is keyed by position and penalties
know where the answer begins, so the tokens are those of an undisturbed run.

A request that kills workers must fail, and those that merely were there must
not. One that has lost its share of workers in the company of other suspects
gets one more attempt, on workers that have no other suspect.

No I/O and no clock.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from baton.core.errors import BatonError, Exhausted, PoisonRequest
from baton.core.types import AttemptKey, Work
from baton.router.placement.placement import Placement, Reason, Suspicion
from baton.router.requests.attempt import AttemptEnded, Tokens

SHORTEST_DELAY_SECONDS = 0.02
LONGEST_DELAY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RetryLimits:
    # Attempts that may end in a worker's death; with the last of them the request fails.
    deaths: int
    # Attempts in all.
    attempts: int


class RetryState:
    """What was emitted, what went wrong, and whether there is another attempt."""

    def __init__(self, work: Work, limits: RetryLimits) -> None:
        self.placements: list[Placement] = []
        self.deaths = 0
        self.delay = 0.0  # seconds to wait before the next attempt
        # The next attempt. Made once, since a prompt may be long.
        self.work = work
        self._first_work = work
        self._limits = limits
        self._emitted: list[int] = []
        self._reason = ""  # why there is another attempt
        self._refusals = 0
        self._alone = False

    @property
    def suspicion(self) -> Suspicion:
        if self._alone:
            return Suspicion.ALONE
        return Suspicion.SUSPECT if self.deaths else Suspicion.NONE

    @property
    def is_retry(self) -> bool:
        return bool(self.placements)

    def begin(self, placement: Placement) -> Work:
        """The next attempt starts there."""
        if self._reason:
            placement = dataclasses.replace(placement, reason=self._reason, code=Reason.RETRY)
        self.placements.append(placement)
        return self.work

    def emitted(self, tokens: Tokens) -> None:
        self._emitted += tokens.token_ids

    def end(self, ended: AttemptEnded) -> BatonError | None:
        """An attempt ended. The request's error, or None when there is another attempt."""
        self.deaths += ended.death
        self._reason = ended.error.message
        self.delay = self._next_delay(ended.error)
        if not ended.retry:
            return ended.error
        if ended.death and self.deaths >= self._limits.deaths:
            if self._alone or not ended.company:
                return _poison(self.deaths, ended.error)
            self._alone = True
        if len(self.placements) >= self._limits.attempts:
            return ended.error
        self.work = self._next_work()
        return None

    def _next_work(self) -> Work:
        first = self._first_work
        return dataclasses.replace(
            first,
            key=AttemptKey(first.key.request_id, first.key.epoch + len(self.placements)),
            prompt_tokens=[*first.prompt_tokens, *self._emitted],
            answer_tokens=len(self._emitted),
            # The prompt's log probabilities come with the first token.
            prompt_logprobs=None if self._emitted else first.prompt_logprobs,
        )

    def _next_delay(self, error: BatonError) -> float:
        """Who was refused for lack of room lets others go first, a little longer each time."""
        if not isinstance(error, Exhausted):
            return 0.0
        self._refusals += 1
        return min(SHORTEST_DELAY_SECONDS * 2.0**self._refusals, LONGEST_DELAY_SECONDS)


def _poison(deaths: int, last: BatonError) -> PoisonRequest:
    return PoisonRequest(
        f"{deaths} workers were lost while they ran this request, so it is not tried again;"
        f" the last: {last.message}"
    )

"""One answer over all of its attempts.

    begin ─▶ attempt ─▶ finished
      ▲         │
      └─ retry ─┴─▶ failed: the request's own fault, or too many deaths or attempts

What was emitted stays emitted: the next attempt prefills prompt and answer together and continues
after them. Sampling is keyed by position and penalties know where the answer begins, so the tokens
are those of an undisturbed run.

A request that kills workers must fail, and those that merely were there must not. One that lost
its share of workers in the company of other suspects gets one more attempt, on workers without
another suspect.

No I/O and no clock.
"""

from __future__ import annotations

import dataclasses

from baton.core.errors import BatonError, Exhausted, PoisonRequest
from baton.core.types import AttemptKey, Work
from baton.router.placement.placement import Placement, Reason, Suspicion
from baton.router.requests.attempt import AttemptEnded, Tokens

SHORTEST_DELAY_SECONDS = 0.02
LONGEST_DELAY_SECONDS = 1.0


class RetryState:
    """What was emitted, what failed, and whether there is another attempt."""

    def __init__(self, work: Work, *, max_deaths: int, max_attempts: int) -> None:
        """With its `max_deaths`-th attempt that ends in a worker's death, the request fails."""
        self.work = work  # of the next attempt; made once, since a prompt may be long
        self.placements: list[Placement] = []
        self.deaths = 0
        self.delay = 0.0  # seconds to wait before the next attempt
        self._first_work = work
        self._max_deaths = max_deaths
        self._max_attempts = max_attempts
        self._emitted: list[int] = []
        self._reason = ""  # of the next attempt
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
        """An attempt ended. Returns the request's error, or None when there is another attempt."""
        self.deaths += ended.death
        self._reason = ended.error.message
        self.delay = self._next_delay(ended.error)
        if not ended.retry:
            return ended.error
        if ended.death and self.deaths >= self._max_deaths:
            if self._alone or not ended.company:
                return PoisonRequest(
                    f"{self.deaths} workers were lost while they ran this request, so it is not"
                    f" retried; the last: {ended.error.message}"
                )
            self._alone = True
        if len(self.placements) >= self._max_attempts:
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
        """Backs off exponentially after a refusal for lack of pages."""
        if not isinstance(error, Exhausted):
            return 0.0
        self._refusals += 1
        return min(SHORTEST_DELAY_SECONDS * 2.0**self._refusals, LONGEST_DELAY_SECONDS)

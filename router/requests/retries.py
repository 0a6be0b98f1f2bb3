"""An answer over all of its attempts.

    begin ─▶ attempt ─▶ finished
      ▲         │ end
      └─ retry ─┴─▶ failed: the request's own fault, or too many attempts

What was emitted stays emitted: the next attempt prefills prompt and emitted tokens together and
continues after them. Sampling is keyed by position and penalties know where the answer begins, so
the tokens are those of an uninterrupted run.

A request that crashes workers must fail; others that ran there must not:

    no charge ─a worker is lost─▶ suspect ─`max_deaths` lost─▶ alone ─crashed─▶ poison request

A loss counts until a verdict acquits the request: the worker was killed or stopped from outside,
or crashed in a step of other requests (verdicts.py). An attempt that runs alone shares its workers
with no other suspect and its steps with no request. If it loses a worker, the request waits for the
verdict, and fails if that names only this request; without a verdict it runs alone again.

Attempts that ended through no fault of the request do not count: acquitted losses, and attempts
that a worker handed back or refused because it drains or its quarantine is full. So the last
attempt waits for verdicts too.

No I/O and no clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from baton.core.errors import (
    BatonError,
    Exhausted,
    PoisonRequest,
    QuarantineFull,
    WorkerDrained,
)
from baton.core.types import AttemptKey, Work
from baton.router.placement.placement import Placement, Reason, Suspicion
from baton.router.requests.attempt import AttemptEnded, Tokens
from baton.router.requests.verdicts import Finding, Loss

SHORTEST_DELAY_SECONDS = 0.02
LONGEST_DELAY_SECONDS = 1.0

UNCOUNTED = (WorkerDrained, QuarantineFull)
"""Errors that concern only the worker: such attempts do not count."""


class RetryState:
    """What was emitted, what failed, and whether there is another attempt."""

    def __init__(self, work: Work, *, max_deaths: int, max_attempts: int) -> None:
        """After `max_deaths` losses without acquittal, the request runs alone."""
        self.work = work  # of the next attempt; made once, since a prompt may be long
        self.placements: list[Placement] = []
        self.delay = 0.0  # seconds to wait before the next attempt
        self._first_work = work
        self._max_deaths = max_deaths
        self._max_attempts = max_attempts
        self._emitted: list[int] = []
        self._reason = ""  # why there is a next attempt
        self._refusals = 0
        self._losses: list[Loss] = []
        self._uncounted = 0  # attempts that a worker handed back or refused
        self._alone = False  # the last attempt was

    @property
    def suspicion(self) -> Suspicion:
        if not self._charges:
            return Suspicion.NONE
        return Suspicion.ALONE if self._charges >= self._max_deaths else Suspicion.SUSPECT

    @property
    def is_retry(self) -> bool:
        return bool(self.placements)

    @property
    def awaits_verdict(self) -> bool:
        """True while a verdict that decides on the request may still come."""
        if self._alone:
            return self._losses[-1].is_open
        last = self._ended.retry and self._attempts >= self._max_attempts
        return last and any(loss.is_open for loss in self._losses)

    def begin(self, placement: Placement) -> Work:
        """Begins the next attempt at a placement. Returns its work."""
        self._alone = self.suspicion is Suspicion.ALONE
        if self._reason:
            alone = f"; alone, since {self._charges} workers were lost" if self._alone else ""
            reason = self._reason + alone
            placement = dataclasses.replace(placement, reason=reason, code=Reason.RETRY)
        self.placements.append(placement)
        return dataclasses.replace(self.work, alone=True) if self._alone else self.work

    def resume(self, token_ids: Sequence[int]) -> None:
        """Makes the first attempt continue after tokens that another router has emitted."""
        self._emitted = list(token_ids)
        self.work = self._next_work()

    def emitted(self, tokens: Tokens) -> None:
        self._emitted += tokens.token_ids

    def end(self, ended: AttemptEnded) -> None:
        """Notes an attempt's end. Call `decide` once no verdict is awaited."""
        self._ended = ended
        self._reason = ended.error.message
        self.delay = self._next_delay(ended.error)
        self._uncounted += isinstance(ended.error, UNCOUNTED)
        if ended.loss is not None:
            self._losses.append(ended.loss)
        else:
            self._alone = False

    def decide(self) -> BatonError | None:
        """Returns the request's error, or None if there is another attempt."""
        ended = self._ended
        if not ended.retry:
            return ended.error
        if self._is_poison:
            return PoisonRequest(
                f"{self._charges} workers were lost while they ran this request, the last one"
                f" while it ran alone, so it is not retried; the last: {self._reason}"
            )
        if self._attempts >= self._max_attempts:
            return ended.error
        self.work = self._next_work()
        return None

    @property
    def _attempts(self) -> int:
        """Number of attempts that count."""
        acquitted = len(self._losses) - self._charges
        return len(self.placements) - self._uncounted - acquitted

    @property
    def _charges(self) -> int:
        """Number of losses of which no verdict acquits the request."""
        return sum(self._finding(loss) is not Finding.INNOCENT for loss in self._losses)

    @property
    def _is_poison(self) -> bool:
        if self._ended.loss is None or self._charges < self._max_deaths:
            return False
        return self._finding(self._ended.loss) is Finding.CULPRIT

    def _finding(self, loss: Loss) -> Finding:
        return loss.finding(self.work.key.request_id, alone=self._alone)

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
        """Backs off exponentially after a refusal."""
        if not isinstance(error, (Exhausted, *UNCOUNTED)):
            return 0.0
        self._refusals += 1
        return min(SHORTEST_DELAY_SECONDS * 2.0**self._refusals, LONGEST_DELAY_SECONDS)

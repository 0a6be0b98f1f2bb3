"""One answer's attempts: each on one pair of workers, until one reaches the end.

An attempt:

    start ─▶ Reserve to decode, Prefill to prefill, at the same moment
          ─▶ ticket from decode, passed on to prefill
          ─▶ token #1 from prefill, emitted at once
          ─▶ tokens from decode, up to the last

Where one token is wanted, only prefill is used; for a local prefill, only decode (Compute). However
it ends, `release` releases what is still held on either side.

An answer over all of its attempts (`RetryState`):

    begin ─▶ attempt ─▶ finished
      ▲         │
      └─ retry ─┴─▶ failed: the request's own fault, or too many deaths or attempts

What was emitted stays emitted: the next attempt prefills prompt and answer together and continues
after them. Sampling is keyed by position and penalties know where the answer begins, so the tokens
are those of an undisturbed run.

A request that kills workers must fail, and those that merely were there must not. One that lost
its share of workers in the company of other suspects gets one more attempt, on workers without
another suspect.

No I/O and no clock: every input returns what to do.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from baton.core.errors import BatonError, DeadlineExceeded, Exhausted, PoisonRequest, WorkerLost
from baton.core.types import AttemptKey, FinishReason, Logprobs, Role, Work
from baton.core.wire import failed_from, finish_from, logprobs_from, work_to
from baton.router.placement.placement import Placement, Reason, Suspicion
from baton.v1 import worker_pb2 as pb

SHORTEST_DELAY_SECONDS = 0.02
LONGEST_DELAY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Send:
    """Send the message to the attempt's worker of that role."""

    role: Role
    message: pb.RouterMessage


class Tokens(NamedTuple):
    """New tokens of an answer."""

    token_ids: list[int]
    finish: FinishReason | None  # set with the last
    cached_tokens: int = 0  # of the prompt, with an attempt's first tokens
    logprobs: tuple[Logprobs, ...] = ()  # one per token, where requested
    fetched_tokens: int = 0  # of cached_tokens, fetched from another worker's cache
    # With an attempt's first tokens, where requested: from the prompt's second token on.
    prompt_logprobs: tuple[Logprobs, ...] = ()
    # Tokens that were guessed and checked, and how many of token_ids they gave.
    guessed: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The attempt ended before the answer did."""

    error: BatonError
    retry: bool  # another attempt may succeed
    death: bool = False  # a worker died, or counts as dead
    company: bool = False  # other suspects were there, each of which may have killed it
    hearsay: bool = False  # a worker reports another as lost, whose own stream is to confirm it


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A worker cannot be reached, or must not be used any more."""

    worker_id: str
    reason: str
    died: bool = True
    company: bool = False  # several suspects were there


# A worker's message about one attempt, its part of a step, or the end of a link.
AttemptEvent = pb.WorkerMessage | pb.StepTokens | LinkLost
Action = Send | Tokens | AttemptEnded


class Attempt:
    """How far an attempt is, and what it holds on its workers."""

    def __init__(
        self,
        work: Work,
        placement: Placement,
        prefill_agent: str,
        decode_agent: str,
        holder_agent: str = "",
    ) -> None:
        self.work = work
        self.placement = placement
        self.queued = True  # no worker has begun it or reserved pages
        self.decoding = False  # a token of decode has come
        self.started = not placement.prefill  # no token #1 of prefill is to come
        self._prefill_agent = prefill_agent
        self._decode_agent = decode_agent
        self._holder_agent = holder_agent
        # Looking for log probabilities takes longer than the rest of a step.
        self._scored = not (work.logprobs is None and work.prompt_logprobs is None)
        self._held: set[Role] = set()
        self._early: list[Tokens] = []  # of decode, which overtook token #1

    @property
    def prefilled(self) -> bool:
        """Whether the prompt is computed."""
        return self.started if self.placement.prefill else self.decoding

    def start(self) -> list[Send]:
        work = work_to(self.work)
        if not self.placement.prefill:
            return [self._hold(Role.DECODE, pb.RouterMessage(compute=pb.Compute(work=work)))]
        sends = []
        if self.placement.decode:
            reserve = pb.Reserve(work=work, sender=self._prefill_agent)
            sends.append(self._hold(Role.DECODE, pb.RouterMessage(reserve=reserve)))
        prefill = pb.Prefill(work=work, receiver=self._decode_agent, holder=self._holder())
        return [*sends, self._hold(Role.PREFILL, pb.RouterMessage(prefill=prefill))]

    def handle(self, event: AttemptEvent) -> list[Action]:
        """Returns what an event leads to, in order."""
        if isinstance(event, pb.StepTokens):
            return self._step(event)
        if isinstance(event, LinkLost):
            return self._lose(event)
        match event.WhichOneof("kind"):
            case "reserved":
                return self._deliver(event.reserved)
            case "first_token":
                return self._first(event.first_token)
            case "pushed":
                self._held.discard(Role.PREFILL)
            case "failed":
                error = failed_from(event.failed)
                hearsay = isinstance(error, WorkerLost)
                return [AttemptEnded(error, event.failed.retry, hearsay=hearsay)]
        return []

    def time_out(self, seconds: float) -> AttemptEnded:
        """No event has come for `seconds`."""
        return AttemptEnded(DeadlineExceeded(f"no token within {seconds:g} seconds"), retry=False)

    def release(self) -> list[Send]:
        """Releases whatever the workers still hold."""
        held = [role for role in Role if role in self._held]
        self._held.clear()
        release = pb.Release(request_id=self.work.key.request_id, epoch=self.work.key.epoch)
        return [Send(role, pb.RouterMessage(release=release)) for role in held]

    def _holder(self) -> pb.Holder | None:
        fetch = self.placement.fetch
        if fetch is None or not self._holder_agent:
            return None
        return pb.Holder(agent=self._holder_agent, pages=fetch.pages, seconds=fetch.seconds)

    def _hold(self, role: Role, message: pb.RouterMessage) -> Send:
        self._held.add(role)
        return Send(role, message)

    def _lose(self, lost: LinkLost) -> list[Action]:
        role = Role.PREFILL if lost.worker_id == self.placement.prefill else Role.DECODE
        # Prefill holds nothing once decode runs, but its token #1 may still be on its way.
        awaited = role is Role.PREFILL and not self.started
        if role not in self._held and not awaited:
            return []
        if lost.died:
            self._held.discard(role)
        error = WorkerLost(f"worker {lost.worker_id} was lost: {lost.reason}")
        return [AttemptEnded(error, retry=True, death=lost.died, company=lost.company)]

    def _deliver(self, reserved: pb.Reserved) -> list[Action]:
        """Passes the ticket on to prefill."""
        self.queued = False
        deliver = pb.Deliver(
            request_id=reserved.request_id, epoch=reserved.epoch, ticket=reserved.ticket
        )
        return [Send(Role.PREFILL, pb.RouterMessage(deliver=deliver))]

    def _first(self, first: pb.FirstToken) -> list[Action]:
        if self.started:
            return []
        self.started = True
        finish = finish_from(first.finish_reason)
        if finish or not self.placement.decode:
            self.queued = False
            self._held.discard(Role.PREFILL)
        tokens = Tokens(
            [first.token],
            finish,
            first.cached_tokens,
            (logprobs_from(first.logprobs),) if first.HasField("logprobs") else (),
            first.fetched_tokens,
            tuple(map(logprobs_from, first.prompt_logprobs)),
        )
        return [tokens, *self._early]

    def _step(self, step: pb.StepTokens) -> list[Action]:
        if not self.decoding:
            self.queued, self.decoding = False, True
            # Its pages have arrived: prefill is no longer needed.
            self._held.discard(Role.PREFILL)
        finish = finish_from(step.finish_reason)
        tokens = Tokens(list(step.token_ids), finish, step.cached_tokens)
        if self._scored:
            tokens = tokens._replace(
                logprobs=tuple(map(logprobs_from, step.logprobs)),
                prompt_logprobs=tuple(map(logprobs_from, step.prompt_logprobs)),
            )
        if guessed := step.guessed_tokens:
            tokens = tokens._replace(guessed=guessed, accepted=len(tokens.token_ids) - 1)
        if finish:
            self._held.discard(Role.DECODE)
        if self.started:
            return [tokens]
        self._early.append(tokens)
        return []


def merged(tokens: list[Tokens]) -> Tokens:
    """Several as one, as if they had come in one message."""
    if len(tokens) == 1:
        return tokens[0]
    return tokens[0]._replace(
        token_ids=[token_id for each in tokens for token_id in each.token_ids],
        finish=tokens[-1].finish,
        logprobs=tuple(scores for each in tokens for scores in each.logprobs),
        guessed=sum(each.guessed for each in tokens),
        accepted=sum(each.accepted for each in tokens),
    )


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

"""One attempt at one answer, on one pair of workers. retries.py has all attempts of an answer.

    start ─▶ Reserve to decode, Prefill to prefill, at the same moment
          ─▶ ticket from decode, passed on to prefill
          ─▶ token #1 from prefill, emitted at once
          ─▶ tokens from decode, up to the last

If one token is wanted, only prefill is used; for a local prefill, only decode (Compute). After any
end, `release` releases what either side still holds.

No I/O and no clock: methods return the actions to carry out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from baton.core.errors import BatonError, DeadlineExceeded, WorkerDrained, WorkerLost
from baton.core.types import FinishReason, Logprobs, Role, Work
from baton.core.wire import failed_from, finish_from, logprobs_from, work_to
from baton.router.placement.placement import Placement
from baton.router.requests.verdicts import Loss
from baton.v1 import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Send:
    """Sends a message to the attempt's worker of that role."""

    role: Role
    message: pb.RouterMessage


class Tokens(NamedTuple):
    """New tokens of an answer."""

    token_ids: list[int]
    finish: FinishReason | None  # set with the last tokens
    cached_tokens: int = 0  # of the prompt, with an attempt's first tokens
    logprobs: tuple[Logprobs, ...] = ()  # one per token, if requested
    fetched_tokens: int = 0  # of cached_tokens, fetched from another worker's cache
    # With an attempt's first tokens, if requested: from the prompt's second token on.
    prompt_logprobs: tuple[Logprobs, ...] = ()
    # Guesses that were checked, and how many of them are in token_ids.
    guessed: int = 0
    accepted: int = 0
    embedding: bytes = b""  # of the prompt, with the first tokens, if requested


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The attempt ended before the answer did."""

    error: BatonError
    retry: bool  # another attempt may succeed
    loss: Loss | None = None  # of the attempt's worker that was lost
    unconfirmed: bool = False  # one worker reported another as lost, whose own stream is still up


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A worker cannot be reached, or must not be used any more."""

    worker_id: str
    reason: str
    loss: Loss | None = None  # None after an orderly end or departure


# A worker's message about one attempt, its part of a step, or the end of a link.
AttemptEvent = pb.WorkerMessage | pb.StepTokens | LinkLost
Action = Send | Tokens | AttemptEnded


class Attempt:
    """An attempt's progress, and what it holds on its workers."""

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
        self.decoding = False  # decode has sent a token
        self.started = not placement.prefill  # token #1 has come, or none comes from prefill
        self._prefill_agent = prefill_agent
        self._decode_agent = decode_agent
        self._holder_agent = holder_agent
        # Other steps are not searched for log probabilities, which takes longer than the rest.
        asked = (work.logprobs, work.prompt_logprobs, work.pooling)
        self._scored = any(each is not None for each in asked)
        self._held: set[Role] = set()
        self._early: list[Tokens] = []  # tokens of decode that overtook token #1

    @property
    def prefilled(self) -> bool:
        """True once the prompt is computed."""
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
        """Returns the actions after an event, in order."""
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
                lost = isinstance(error, WorkerLost)
                return [AttemptEnded(error, event.failed.retry, unconfirmed=lost)]
        return []

    def time_out(self, seconds: float) -> AttemptEnded:
        """Returns the end of an attempt without events for `seconds`."""
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
        # Once decode runs, prefill holds nothing, but its token #1 may still be on its way.
        awaited = role is Role.PREFILL and not self.started
        if role not in self._held and not awaited:
            return []
        if lost.loss is None:
            error: BatonError = WorkerDrained(f"worker {lost.worker_id} drained: {lost.reason}")
            return [AttemptEnded(error, retry=True)]
        self._held.discard(role)
        error = WorkerLost(f"worker {lost.worker_id} was lost: {lost.reason}")
        return [AttemptEnded(error, retry=True, loss=lost.loss)]

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
            embedding=first.embedding,
        )
        return [tokens, *self._early]

    def _step(self, step: pb.StepTokens) -> list[Action]:
        if not self.decoding:
            self.queued, self.decoding = False, True
            # All pages have arrived, so prefill holds nothing.
            self._held.discard(Role.PREFILL)
        finish = finish_from(step.finish_reason)
        tokens = Tokens(list(step.token_ids), finish, step.cached_tokens)
        if self._scored:
            tokens = tokens._replace(
                logprobs=tuple(map(logprobs_from, step.logprobs)),
                prompt_logprobs=tuple(map(logprobs_from, step.prompt_logprobs)),
                embedding=step.embedding,
            )
        if guessed := step.guessed_tokens:
            tokens = tokens._replace(guessed=guessed, accepted=len(tokens.token_ids) - 1)
        if finish:
            self._held.discard(Role.DECODE)
        if self.started:
            return [tokens]
        self._early.append(tokens)
        return []


def merge_tokens(tokens: list[Tokens]) -> Tokens:
    """Merges successive tokens, as if they had come in one message."""
    if len(tokens) == 1:
        return tokens[0]
    return tokens[0]._replace(
        token_ids=[token_id for each in tokens for token_id in each.token_ids],
        finish=tokens[-1].finish,
        logprobs=tuple(scores for each in tokens for scores in each.logprobs),
        guessed=sum(each.guessed for each in tokens),
        accepted=sum(each.accepted for each in tokens),
    )

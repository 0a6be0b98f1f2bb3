"""One try at a request, on one pair of workers.

    start ─▶ Reserve to decode, Prefill to prefill, at the same moment
          ─▶ ticket from decode, passed on to prefill
          ─▶ token #1 from prefill, straight to the caller
          ─▶ tokens from decode until one of them is the last

Where one token is wanted, prefill alone is asked; where no prefill worker can
help, decode alone (Compute). However it ends, `release` lets go of what is
still held on either side.

No I/O and no clock: every input returns what to do.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from baton.core.errors import BatonError, DeadlineExceeded, WorkerLost
from baton.core.types import FinishReason, Logprobs, Work
from baton.core.wire import failed_from, finish_from, logprobs_from, work_to
from baton.router.placement.placement import Placement
from baton.v1 import worker_pb2 as pb


class Side(enum.Enum):
    PREFILL = enum.auto()
    DECODE = enum.auto()


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to the attempt's worker on that side."""

    side: Side
    message: pb.RouterMessage


class Tokens(NamedTuple):
    """New tokens of an answer; `finish` is set with the last."""

    token_ids: list[int]
    finish: FinishReason | None
    # With an attempt's first: of its prompt, what was cached where it was read.
    cached_tokens: int = 0
    # How likely each of them was, where the request asks for it.
    logprobs: tuple[Logprobs, ...] = ()
    # Of cached_tokens, what was fetched from another worker's cache.
    fetched_tokens: int = 0
    # With an attempt's first: how likely the prompt's tokens were, from its second on.
    prompt_logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The attempt is over without the answer's end."""

    error: BatonError
    # Whether another attempt may succeed.
    retry: bool
    # Whether a worker died, or counts as dead.
    death: bool = False
    # Whether other suspects were there, each of which may have killed it.
    company: bool = False
    # Whether a worker says that another one is lost, which its own stream will show if it is so.
    hearsay: bool = False


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A worker can no longer be reached, or is no longer to be used."""

    worker_id: str
    reason: str
    # False when the worker lives on, but not for us.
    died: bool = True
    # Whether several requests were there that had lost a worker before.
    company: bool = False


# A worker's message about one attempt, its part of a step, or the end of a link.
AttemptEvent = pb.WorkerMessage | pb.StepTokens | LinkLost
Action = Send | Tokens | AttemptEnded


class Attempt:
    """What one try at a request holds on its workers, and how far it is."""

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
        self.queued = True  # no worker has begun or promised anything yet
        self.decoding = False  # a token of decode has come
        # Whether no token #1 of prefill is to come any more.
        self.started = not placement.prefill
        self._prefill_agent = prefill_agent
        self._decode_agent = decode_agent
        self._holder_agent = holder_agent
        # Whether tokens come with how likely they were. Looking for it takes longer than the rest.
        self._scored = not (work.logprobs is None and work.prompt_logprobs is None)
        self._held: set[Side] = set()
        # Tokens of decode that overtook token #1 on their way here.
        self._early: list[Tokens] = []

    def start(self) -> list[Send]:
        work = work_to(self.work)
        if not self.placement.prefill:
            return [self._hold(Side.DECODE, pb.RouterMessage(compute=pb.Compute(work=work)))]
        sends = []
        if self.placement.decode:
            reserve = pb.Reserve(work=work, sender=self._prefill_agent)
            sends.append(self._hold(Side.DECODE, pb.RouterMessage(reserve=reserve)))
        prefill = pb.Prefill(work=work, receiver=self._decode_agent, holder=self._holder())
        return [*sends, self._hold(Side.PREFILL, pb.RouterMessage(prefill=prefill))]

    def handle(self, event: AttemptEvent) -> list[Action]:
        """What an event leads to, in order."""
        if isinstance(event, pb.StepTokens):
            return self._step(event)
        if isinstance(event, LinkLost):
            return self._lose(event)
        match event.WhichOneof("kind"):
            case "reserved":
                return self._pass_on(event.reserved)
            case "first_token":
                return self._first(event.first_token)
            case "pushed":
                self._held.discard(Side.PREFILL)
            case "failed":
                return [_ended(event.failed)]
        return []

    def time_out(self, seconds: float) -> AttemptEnded:
        """Nothing has come for `seconds`, which is too long."""
        return AttemptEnded(DeadlineExceeded(f"no token within {seconds:g} seconds"), retry=False)

    def release(self) -> list[Send]:
        """Lets go of whatever the workers still hold."""
        key = self.work.key
        sends = []
        for side in sorted(self._held, key=lambda side: side.value):
            release = pb.Release(request_id=key.request_id, epoch=key.epoch)
            sends.append(Send(side, pb.RouterMessage(release=release)))
        self._held.clear()
        return sends

    def _holder(self) -> pb.Holder | None:
        fetch = self.placement.fetch
        if fetch is None or not self._holder_agent:
            return None
        return pb.Holder(agent=self._holder_agent, pages=fetch.pages, seconds=fetch.seconds)

    def _hold(self, side: Side, message: pb.RouterMessage) -> Send:
        self._held.add(side)
        return Send(side, message)

    def _lose(self, lost: LinkLost) -> list[Action]:
        side = Side.PREFILL if lost.worker_id == self.placement.prefill else Side.DECODE
        # Prefill holds nothing once decode writes, but its token #1 may still be on its way.
        awaited = side is Side.PREFILL and not self.started
        if side not in self._held and not awaited:
            return []
        if lost.died:
            self._held.discard(side)
        error = WorkerLost(f"worker {lost.worker_id} was lost: {lost.reason}")
        return [AttemptEnded(error, retry=True, death=lost.died, company=lost.company)]

    def _pass_on(self, reserved: pb.Reserved) -> list[Action]:
        self.queued = False
        deliver = pb.Deliver(
            request_id=reserved.request_id, epoch=reserved.epoch, ticket=reserved.ticket
        )
        return [Send(Side.PREFILL, pb.RouterMessage(deliver=deliver))]

    def _first(self, first: pb.FirstToken) -> list[Action]:
        if self.started:
            return []
        self.started = True
        finish = finish_from(first.finish_reason)
        if finish or not self.placement.decode:
            self.queued = False
            self._held.discard(Side.PREFILL)
        logprobs = (logprobs_from(first.logprobs),) if first.HasField("logprobs") else ()
        prompt = tuple(map(logprobs_from, first.prompt_logprobs))
        found = first.cached_tokens, logprobs, first.fetched_tokens, prompt
        return [Tokens([first.token], finish, *found), *self._early]

    def _step(self, step: pb.StepTokens) -> list[Action]:
        if not self.decoding:
            self.queued, self.decoding = False, True
            # Its pages have arrived: prefill is no longer needed.
            self._held.discard(Side.PREFILL)
        finish = finish_from(step.finish_reason)
        tokens = Tokens(list(step.token_ids), finish, step.cached_tokens)
        if self._scored:
            tokens = tokens._replace(
                logprobs=tuple(map(logprobs_from, step.logprobs)),
                prompt_logprobs=tuple(map(logprobs_from, step.prompt_logprobs)),
            )
        if finish:
            self._held.discard(Side.DECODE)
        if self.started:
            return [tokens]
        self._early.append(tokens)
        return []


def _ended(failed: pb.Failed) -> AttemptEnded:
    error = failed_from(failed)
    return AttemptEnded(error, retry=failed.retry, hearsay=isinstance(error, WorkerLost))


def merged(tokens: list[Tokens]) -> Tokens:
    """Several as one, as if they had come in one message."""
    if len(tokens) == 1:
        return tokens[0]
    return tokens[0]._replace(
        token_ids=[token_id for each in tokens for token_id in each.token_ids],
        finish=tokens[-1].finish,
        logprobs=tuple(scores for each in tokens for scores in each.logprobs),
    )

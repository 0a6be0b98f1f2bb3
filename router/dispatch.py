"""One request's whole life on the workers, top to bottom.

place ─▶ Reserve to decode, Prefill to prefill, at the same moment
      ─▶ ticket from decode, passed on to prefill
      ─▶ token #1 from prefill, straight to the caller
      ─▶ tokens from decode until one of them is the last
and, however it ends, release what is still held on either side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from baton.v1 import worker_pb2 as pb
from core.config import RouterConfig
from core.errors import DeadlineExceeded, WorkerLost
from core.types import FinishReason, Work
from core.wire import failed_from, finish_from, work_to
from router.link import Event, Inbox, LinkLost
from router.metrics import RouterMetrics
from router.policy import Placement
from router.roster import Roster


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of an answer; `finish` is set with the last."""

    token_ids: list[int]
    finish: FinishReason | None


class Dispatcher:
    def __init__(self, roster: Roster, config: RouterConfig, metrics: RouterMetrics) -> None:
        self._roster = roster
        self._config = config
        self._metrics = metrics

    async def run(self, work: Work) -> AsyncGenerator[Placement | Tokens]:
        """Yields the placement, then the tokens. Closing the iterator cancels the request."""
        placement = await self._roster.place(self._config.placement_timeout)
        attempt = _Attempt(work, placement, self._roster, self._metrics)
        try:
            attempt.start()
            yield placement
            finish = None
            while finish is None:
                for tokens in attempt.take(await self._next_event(attempt)):
                    finish = tokens.finish
                    yield tokens
        finally:
            attempt.release()

    async def _next_event(self, attempt: _Attempt) -> Event:
        config = self._config
        # Until decode writes, the request may just be waiting for its turn.
        limit = config.stall_timeout if attempt.decoding else config.first_token_timeout
        try:
            async with asyncio.timeout(limit):
                return await attempt.inbox.get()
        except TimeoutError:
            raise DeadlineExceeded(f"no token within {limit:g} seconds") from None


class _Attempt:
    """What one try at a request holds on the two workers."""

    def __init__(
        self, work: Work, placement: Placement, roster: Roster, metrics: RouterMetrics
    ) -> None:
        self.inbox: Inbox = asyncio.Queue()
        self.started = False  # token #1 has come
        self.decoding = False  # a token of decode has come
        self._work = work
        self._roster = roster
        self._metrics = metrics
        # A request that is done after token #1 never touches decode.
        self._push = work.max_tokens > 1
        self._prefill = roster.find(placement.prefill)
        self._decode = roster.find(placement.decode)
        self._on_prefill = self._on_decode = self._delivered = False
        self._pending_tokens = 0
        # Tokens of decode that overtook token #1 on their way here.
        self._early: list[Tokens] = []

    def start(self) -> None:
        work = work_to(self._work)
        if self._push:
            self._on_decode = True
            self._decode.open(self._work.key, self.inbox)
            reserve = pb.Reserve(work=work, sender=self._prefill.agent)
            self._decode.send(pb.RouterMessage(reserve=reserve))
        self._on_prefill = True
        self._prefill.open(self._work.key, self.inbox)
        self._count_pending(len(self._work.prompt_tokens))
        receiver = self._decode.agent if self._push else ""
        self._prefill.send(pb.RouterMessage(prefill=pb.Prefill(work=work, receiver=receiver)))

    def take(self, event: Event) -> Iterator[Tokens]:
        """The tokens that an event brings to the caller, in order."""
        if isinstance(event, LinkLost):
            raise WorkerLost(f"worker {event.worker_id} went away during the request")
        match event.WhichOneof("kind"):
            case "reserved":
                self._pass_on(event.reserved)
            case "first_token":
                yield self._first(event.first_token)
                yield from self._early
            case "step":
                yield from self._step(event.step.tokens[0])
            case "pushed":
                self._on_prefill = False
                self._metrics.pushed(event.pushed)
            case "failed":
                self._fail(event.failed)

    def release(self) -> None:
        """Lets go of whatever the workers still hold."""
        key = self._work.key
        self._count_pending(0)
        release = pb.Release(request_id=key.request_id, epoch=key.epoch)
        if self._on_prefill:
            self._prefill.send(pb.RouterMessage(release=release))
        if self._on_decode:
            release.undelivered = not self._delivered
            self._decode.send(pb.RouterMessage(release=release))
        self._prefill.close(key)
        self._decode.close(key)

    def _pass_on(self, reserved: pb.Reserved) -> None:
        deliver = pb.Deliver(
            request_id=reserved.request_id, epoch=reserved.epoch, ticket=reserved.ticket
        )
        self._delivered = True
        self._prefill.send(pb.RouterMessage(deliver=deliver))
        self._metrics.queued("reserve", reserved.queue_seconds)

    def _first(self, first: pb.FirstToken) -> Tokens:
        self.started = True
        self._count_pending(0)
        self._metrics.prefilled(first)
        finish = finish_from(first.finish_reason)
        if finish or not self._push:
            self._on_prefill = False
        return Tokens([first.token], finish)

    def _step(self, step: pb.StepTokens) -> Iterator[Tokens]:
        self.decoding = True
        if step.queue_seconds:
            self._metrics.queued("decode", step.queue_seconds)
        tokens = Tokens(list(step.token_ids), finish_from(step.finish_reason))
        if tokens.finish:
            self._on_decode = False
        if self.started:
            yield tokens
        else:
            self._early.append(tokens)

    def _fail(self, failed: pb.Failed) -> None:
        error = failed_from(failed)
        if isinstance(error, WorkerLost):
            self._roster.reconnect(self._prefill, self._decode)
        raise error

    def _count_pending(self, tokens: int) -> None:
        self._prefill.pending_tokens += tokens - self._pending_tokens
        self._pending_tokens = tokens

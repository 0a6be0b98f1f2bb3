"""Runs one answer on the workers: makes attempts until one completes.

place ─▶ attempt (router/requests/attempt.py) ─▶ last token
  ▲         │
  └─────────┘ a worker was lost, drained or out of pages: retry after the last emitted token

Attempts decide, without I/O; the dispatcher carries their decisions out. It also runs canaries.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.core.config import RouterConfig
from baton.core.errors import InvalidAdapter, Unavailable, WorkerLost
from baton.core.types import Adapter, AttemptKey, Pooling, Request, Role, Sampling, Work
from baton.router.answers.answer import Answer
from baton.router.observe.ledger import AnswerLedger
from baton.router.observe.metrics import RouterMetrics
from baton.router.placement.placement import Placement, Reason, Suspicion
from baton.router.placement.placer import Placer
from baton.router.placement.worker_state import QueuedPrompt
from baton.router.requests.admission import Admission, Assignment
from baton.router.requests.attempt import (
    Attempt,
    AttemptEnded,
    AttemptEvent,
    Send,
    Tokens,
    merge_tokens,
)
from baton.router.requests.feedback import Feedback
from baton.router.requests.inbox import Inbox, Rounds
from baton.router.requests.retries import RetryState
from baton.router.requests.verdicts import Loss
from baton.router.workers.link import WorkerLink
from baton.router.workers.membership import Membership
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

CANARY_SECONDS = 10.0
"""How long a canary may take."""

CONFIRM_SECONDS = 0.5
"""How long a lost worker's own stream may take to confirm what another worker reported."""


@dataclass(slots=True)
class Dispatcher:
    membership: Membership
    placer: Placer
    admission: Admission
    config: RouterConfig
    metrics: RouterMetrics
    rounds: Rounds = field(default_factory=Rounds)

    async def run(self, work: Work, request: Request, answer: Answer) -> None:
        """Runs attempts and pushes their placements and tokens to `answer` until it is complete.
        Cancelling this cancels the request."""
        config = self.config
        state = RetryState(
            work, max_deaths=config.max_worker_deaths, max_attempts=config.max_attempts
        )
        if request.resumed:
            state.resume(request.resumed)
        place = self.admission.arrive(request.priority, request.tenant)

        def push(tokens: Tokens) -> bool:
            state.emitted(tokens)
            return answer.push(tokens)

        while True:
            assignment = await self.admission.assign(place, state, request.deadline)
            work = state.begin(assignment.placement)
            running = RunningAttempt(self, work, assignment, state.suspicion, answer.ledger)
            try:
                running.start()
                self.metrics.placed(state.placements[-1])
                answer.placed(state.placements[-1])
                ended = await running.drain(push)
            finally:
                running.release()
            if ended is None:
                return
            state.end(await self._confirmed(running, ended))
            await self.membership.wait_until(
                lambda: not state.awaits_verdict, config.placement_timeout
            )
            self._retry(state, assignment, ended)
            await asyncio.sleep(state.delay)
            answer.ledger.lose()

    async def run_canary(self, seconds: float) -> None:
        """Sends every idle worker a small probe request every `seconds`, until cancelled.

        A worker that answers pings may still be unable to compute, with a hung device or a damaged
        model. A worker that fails its canary gets no requests until it passes one.
        """
        while True:
            await asyncio.sleep(seconds)
            links = self.membership.links
            idle = [link for link in links if link.takes_requests and not link.has_requests]
            await asyncio.gather(*map(self._probe, idle))

    async def _probe(self, link: WorkerLink) -> None:
        problem = await self._try_worker(link)
        if problem:
            log.warning("worker %s failed its canary: %s", link.worker_id, problem)
        if link.welcome:
            link.note_canary(f"its canary failed: {problem}" if problem else "")

    async def try_adapter(self, adapter: Adapter) -> None:
        """Loads an adapter on every worker. Raises InvalidAdapter if one cannot."""
        links = [link for link in self.membership.links if link.takes_requests]
        if not links:
            raise Unavailable("no workers are ready")
        problems = await asyncio.gather(*(self._try_worker(link, adapter) for link in links))
        for link, problem in zip(links, problems, strict=True):
            if problem:
                raise InvalidAdapter(f"{link.worker_id} cannot load the adapter: {problem}")

    async def _try_worker(self, link: WorkerLink, adapter: Adapter | None = None) -> str:
        """Generates one token on the worker, after token 0, which every vocabulary has. Returns
        the error, or ""."""
        key = AttemptKey(f"canary-{uuid.uuid4().hex}", 1)
        work = Work(key, [0], Sampling(), 1, frozenset(), adapter=adapter)
        if link.role is Role.PREFILL:
            placement = Placement(link.worker_id, "", code=Reason.CANARY)
            assignment = Assignment(placement, link, None)
        else:
            placement = Placement("", link.worker_id, code=Reason.CANARY)
            assignment = Assignment(placement, None, link)
        running = RunningAttempt(self, work, assignment, Suspicion.NONE, AnswerLedger(0.0))
        try:
            running.start()
            async with asyncio.timeout(CANARY_SECONDS):
                ended = await running.drain(lambda tokens: False)
            return ended.error.message if ended else ""
        except TimeoutError:
            return f"no token within {CANARY_SECONDS:g} seconds"
        finally:
            running.release()

    async def _confirmed(self, running: RunningAttempt, ended: AttemptEnded) -> AttemptEnded:
        """If a worker reported another as lost, waits for the other's own stream to end."""
        if not ended.unconfirmed:
            return ended
        await self.membership.wait_until(lambda: running.loss is not None, CONFIRM_SECONDS)
        return replace(ended, loss=running.loss)

    def _retry(self, state: RetryState, assignment: Assignment, ended: AttemptEnded) -> None:
        """Raises the request's error unless there is another attempt."""
        if isinstance(ended.error, WorkerLost) and assignment.prefill and assignment.decode:
            self.membership.pairs.reconnect(assignment.prefill, assignment.decode)
        error = state.decide()
        if error is not None:
            raise error
        self.metrics.retried(ended.error)
        log.warning("retrying a request: %s", ended.error.message)


class RunningAttempt:
    """An attempt with its inbox and the capacity that it holds on its workers."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        work: Work,
        assignment: Assignment,
        suspicion: Suspicion,
        ledger: AnswerLedger,
    ) -> None:
        self._inbox = Inbox(dispatcher.rounds, self._handle, self._more_time)
        self._feedback = Feedback(work, assignment, dispatcher.placer, dispatcher.metrics, ledger)
        self._config = dispatcher.config
        # Called once a worker has capacity for another request.
        self._on_capacity = dispatcher.admission.wake
        self._service = dispatcher.admission.service
        self._begun_at: float | None = None
        self._assignment = assignment
        self._suspicion = suspicion
        self._push: Callable[[Tokens], bool] = lambda tokens: True
        self._ended: AttemptEnded | None = None
        self._prompt: QueuedPrompt | None = None  # until it is prefilled
        self._unanswered = False
        self._encoded = work.pooling is Pooling.ENCODER
        self._live: list[WorkerLink] = []  # workers on which it is counted as a live request
        # Kept here, since a link gets a new index with the worker's next process.
        self._cache = assignment.prefiller.cache
        self._agents = [link.agent for link in assignment.links]
        workers = assignment.prefill, assignment.decode, assignment.holder
        agents = [link.agent if link else "" for link in workers]
        work = dispatcher.membership.with_sources(work, assignment.links)
        self._attempt = Attempt(work, assignment.placement, *agents)

    @property
    def loss(self) -> Loss | None:
        """The loss of one of its workers: the process ended or cannot be reached."""
        links = zip(self._assignment.links, self._agents, strict=True)
        return next((link.loss for link, agent in links if link.agent != agent), None)

    def start(self) -> None:
        work, forecast = self._attempt.work, self._attempt.placement.forecast
        self._cache.add_pending(work.page_keys)
        for link in self._assignment.links:
            link.open(work.key, self._inbox.put)
            link.assigned.count_suspect(self._suspicion, +1)
            link.assigned.count_adapter(work.adapter_digest, +1)
        cached = forecast.cached_tokens if forecast else 0
        # Other prompts do not wait for a background prompt.
        tokens = (0, 0) if work.background else (len(work.prompt_tokens), cached)
        self._prompt = self._assignment.prefiller.prompts.add(*tokens)
        self._unanswered = True
        self._assignment.responder.assigned.count_unanswered(+1, encoded=self._encoded)
        if not work.background and self._assignment.placement.code is not Reason.CANARY:
            for link in self._assignment.links:
                link.count_live(+1)
                self._live.append(link)
        self._send(self._attempt.start())

    async def drain(self, push: Callable[[Tokens], bool]) -> AttemptEnded | None:
        """Calls `push` with tokens as they come, until it returns False. If the attempt ends
        earlier, returns how."""
        self._push = push
        if not await self._inbox.drain(self._timeout):
            return self._attempt.time_out(self._timeout)
        return self._ended

    @property
    def _timeout(self) -> float:
        """Longer before the first decode step: the request may be queued."""
        config = self._config
        return config.stall_timeout if self._attempt.decoding else config.first_token_timeout

    def _more_time(self) -> float:
        """Returns the seconds by which a pause extends a background request's timeout."""
        if not self._attempt.work.background:
            return 0.0
        paused_at = max(link.paused_at for link in self._assignment.links)
        return max(0.0, paused_at + self._timeout - time.monotonic())

    def _handle(self, events: list[AttemptEvent]) -> float:
        tokens = self._tokens(events)
        if tokens is not None and not self._push(tokens):
            self._ended = None  # an end after the last wanted token does not matter
            return 0.0
        return 0.0 if self._ended else self._timeout

    def _tokens(self, events: list[AttemptEvent]) -> Tokens | None:
        """Carries out the attempt's actions up to its end, and returns the new tokens."""
        tokens: list[Tokens] = []
        for event in events:
            if isinstance(event, pb.StepTokens):
                self._feedback.note_step(event)
            elif isinstance(event, pb.WorkerMessage):
                self._feedback.note(event)
            for action in self._attempt.handle(event):
                if isinstance(action, Tokens):
                    tokens.append(action)
                elif isinstance(action, AttemptEnded):
                    self._ended = action
                else:
                    self._send([action])
            if self._ended:
                break
        if self._unanswered or self._prompt is not None:
            attempt = self._attempt
            if self._unanswered and not attempt.queued:
                self._note_begin()
            self._free_capacity(prefilled=attempt.prefilled, answered=not attempt.queued)
        return merge_tokens(tokens) if tokens else None

    def _note_begin(self) -> None:
        """Starts measuring once a worker has begun the request or reserved its pages. Canaries,
        which have no forecast, and background requests, which may pause, are not measured."""
        if self._attempt.placement.forecast and not self._attempt.work.background:
            self._begun_at = time.monotonic()
            self._service.begin()

    def release(self) -> None:
        """Releases whatever the workers still hold."""
        self._send(self._attempt.release())
        for link in self._assignment.links:
            link.close(self._attempt.work.key)
            link.assigned.count_suspect(self._suspicion, -1)
            link.assigned.count_adapter(self._attempt.work.adapter_digest, -1)
        self._cache.remove_pending(self._attempt.work.page_keys)
        self._free_capacity(prefilled=True, answered=True)
        if self._begun_at is not None:
            self._service.end(time.monotonic() - self._begun_at)
        self._end_live(len(self._live))
        self._on_capacity()

    def _send(self, sends: list[Send]) -> None:
        for send in sends:
            prefills = send.role is Role.PREFILL
            link = self._assignment.prefill if prefills else self._assignment.decode
            assert link is not None
            link.send(send.message)

    def _free_capacity(self, *, prefilled: bool, answered: bool) -> None:
        """Frees the capacity of a computed prompt, and of a request that was answered."""
        if prefilled and self._prompt is not None:
            self._assignment.prefiller.prompts.remove(self._prompt)
            self._prompt = None
            self._end_live(len(self._live) - 1)
        if answered and self._unanswered:
            self._unanswered = False
            self._assignment.responder.assigned.count_unanswered(-1, encoded=self._encoded)
            self._on_capacity()

    def _end_live(self, count: int) -> None:
        """Stops counting the request as live on its first `count` workers, prefill first."""
        for link in self._live[:count]:
            link.count_live(-1)
        del self._live[:count]

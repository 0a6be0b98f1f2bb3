"""Runs one answer on the workers: attempts, until one of them reaches the end.

place ─▶ attempt (router/requests/attempt.py) ─▶ last token
  ▲         │
  └─────────┘ a worker was lost, drained or out of pages: retry after the last emitted token
              (router/requests/retries.py)

Attempt and retries decide, without I/O; the dispatcher carries out.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable

from baton.core.config import RouterConfig
from baton.core.errors import WorkerLost
from baton.core.types import Work
from baton.router.answers.answer import Answer
from baton.router.observe.ledger import AnswerLedger
from baton.router.observe.metrics import RouterMetrics
from baton.router.placement.placement import Suspicion
from baton.router.placement.placer import Placer
from baton.router.placement.worker_state import QueuedPrompt
from baton.router.requests.admission import Admission, Assignment
from baton.router.requests.attempt import (
    Attempt,
    AttemptEnded,
    AttemptEvent,
    Send,
    Side,
    Tokens,
    merged,
)
from baton.router.requests.feedback import Feedback
from baton.router.requests.inbox import Inbox, Rounds
from baton.router.requests.retries import RetryState
from baton.router.workers.membership import Membership
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

HEARSAY_SECONDS = 0.5
"""How long a lost worker's own stream may take to confirm what another worker reported."""


class Dispatcher:
    def __init__(
        self,
        membership: Membership,
        placer: Placer,
        admission: Admission,
        config: RouterConfig,
        metrics: RouterMetrics,
    ) -> None:
        self.placer = placer
        self.admission = admission
        self.config = config
        self.metrics = metrics
        self.rounds = Rounds()
        self._membership = membership

    async def run(self, work: Work, deadline: float, answer: Answer) -> None:
        """Reports each attempt's placement and pushes its tokens until the answer is complete.
        Cancelling this cancels the request."""
        config = self.config
        state = RetryState(
            work, max_deaths=config.max_worker_deaths, max_attempts=config.max_attempts
        )
        order = self.admission.arrive()

        def push(tokens: Tokens) -> bool:
            state.emitted(tokens)
            return answer.push(tokens)

        while True:
            assignment = await self.admission.assign(order, state, deadline)
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
            self._retry(state, assignment, await self._confirmed(running, ended))
            await asyncio.sleep(state.delay)
            answer.ledger.lose()

    async def probe(self, work: Work, assignment: Assignment, seconds: float) -> str:
        """Makes one token on the given workers. Returns what went wrong, or an empty string."""
        running = RunningAttempt(self, work, assignment, Suspicion.NONE, AnswerLedger(0.0))
        try:
            running.start()
            async with asyncio.timeout(seconds):
                ended = await running.drain(lambda tokens: False)
            return ended.error.message if ended else ""
        except TimeoutError:
            return f"no token within {seconds:g} seconds"
        finally:
            running.release()

    async def _confirmed(self, running: RunningAttempt, ended: AttemptEnded) -> AttemptEnded:
        """Waits, where a worker reported another as lost, for that one's own stream to end."""
        if not ended.hearsay:
            return ended
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARSAY_SECONDS):
                await self._membership.wait_until(lambda: running.has_lost_a_worker)
        return dataclasses.replace(
            ended, death=running.has_lost_a_worker, company=running.has_company
        )

    def _retry(self, state: RetryState, assignment: Assignment, ended: AttemptEnded) -> None:
        """Raises the request's error unless there is another attempt."""
        if isinstance(ended.error, WorkerLost) and assignment.prefill and assignment.decode:
            self._membership.pairs.reconnect(assignment.prefill, assignment.decode)
        error = state.end(ended)
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
        self._inbox = Inbox(dispatcher.rounds, self._handle)
        self._feedback = Feedback(work, assignment, dispatcher.placer, dispatcher.metrics, ledger)
        self._config = dispatcher.config
        # When a worker may get another request in place of this one.
        self._on_room = dispatcher.admission.wake
        self._assignment = assignment
        self._suspicion = suspicion
        self._push: Callable[[Tokens], bool] = lambda tokens: True
        self._ended: AttemptEnded | None = None
        self._links = {Side.PREFILL: assignment.prefill, Side.DECODE: assignment.decode}
        self._prompt: QueuedPrompt | None = None  # until it is prefilled
        self._unanswered = 0
        # The index of this process of the worker: a new process gets a new one.
        self._cache = assignment.prefiller.cache
        self._agents = [link.agent for link in assignment.links]
        workers = assignment.prefill, assignment.decode, assignment.holder
        agents = [link.agent if link else "" for link in workers]
        self._attempt = Attempt(work, assignment.placement, *agents)

    @property
    def has_lost_a_worker(self) -> bool:
        """Whether the process of one of its workers ended or cannot be reached."""
        return [link.agent for link in self._assignment.links] != self._agents

    @property
    def has_company(self) -> bool:
        """Whether other suspects are on its workers."""
        return any(link.assigned.suspects for link in self._assignment.links)

    def start(self) -> None:
        self._cache.add_pending(self._attempt.work.page_keys)
        for link in self._assignment.links:
            link.open(self._attempt.work.key, self._inbox.put)
        self._count_suspect(+1)
        self._count()
        self._send(self._attempt.start())

    async def drain(self, push: Callable[[Tokens], bool]) -> AttemptEnded | None:
        """Calls `push` with tokens as they come, until it returns False. Returns how the attempt
        ended where it ended before."""
        self._push = push
        if not await self._inbox.drain(self._patience):
            return self._attempt.time_out(self._patience)
        return self._ended

    @property
    def _patience(self) -> float:
        """Before its first decode step, the request may just be queued."""
        config = self._config
        return config.stall_timeout if self._attempt.decoding else config.first_token_timeout

    def _handle(self, events: list[AttemptEvent]) -> float:
        tokens = self._tokens(events)
        if tokens is not None and not self._push(tokens):
            self._ended = None  # whatever came after the last wanted token
            return 0.0
        return 0.0 if self._ended else self._patience

    def _tokens(self, events: list[AttemptEvent]) -> Tokens | None:
        """Carries out what the events lead to, up to the attempt's end."""
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
            self._count()
        return merged(tokens) if tokens else None

    def release(self) -> None:
        """Releases whatever the workers still hold."""
        self._send(self._attempt.release())
        for link in self._assignment.links:
            link.close(self._attempt.work.key)
        self._cache.remove_pending(self._attempt.work.page_keys)
        self._count_suspect(-1)
        self._count_as(prefilling=False, unanswered=0)
        self._on_room()

    def _send(self, sends: list[Send]) -> None:
        for send in sends:
            link = self._links[send.side]
            assert link is not None
            link.send(send.message)

    def _count_suspect(self, change: int) -> None:
        for link in self._assignment.links:
            link.assigned.count_suspect(self._suspicion, change)

    def _count(self) -> None:
        attempt = self._attempt
        prefilled = attempt.started if attempt.placement.prefill else attempt.decoding
        self._count_as(prefilling=not prefilled, unanswered=int(attempt.queued))

    def _count_as(self, *, prefilling: bool, unanswered: int) -> None:
        prompts = self._assignment.prefiller.prompts
        if prefilling and self._prompt is None:
            forecast = self._attempt.placement.forecast
            cached = forecast.cached_tokens if forecast else 0
            self._prompt = prompts.add(len(self._attempt.work.prompt_tokens), cached)
        elif not prefilling and self._prompt is not None:
            prompts.remove(self._prompt)
            self._prompt = None
        self._assignment.responder.assigned.count_unanswered(unanswered - self._unanswered)
        answered = unanswered < self._unanswered
        self._unanswered = unanswered
        if answered:
            self._on_room()

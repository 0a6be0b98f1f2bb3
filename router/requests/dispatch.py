"""One request's life on the workers: attempts, until one of them reaches the end.

place ─▶ attempt (router/requests/attempt.py) ─▶ last token
  ▲         │
  └─────────┘ a worker was lost, drained or out of room: go on elsewhere, behind
              what was emitted (router/requests/retries.py)

What is decided is decided there, without I/O; here it is carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import Protocol

from baton.core.config import RouterConfig
from baton.core.errors import WorkerLost
from baton.core.types import Work
from baton.router.observe.ledger import AnswerLedger
from baton.router.observe.metrics import RouterMetrics
from baton.router.placement.placement import Placement, Suspicion
from baton.router.placement.placer import Placer
from baton.router.placement.worker_state import QueuedPrompt
from baton.router.requests.admission import Admission, Assignment
from baton.router.requests.attempt import Attempt, AttemptEnded, AttemptEvent, Send, Side, Tokens
from baton.router.requests.feedback import Feedback
from baton.router.requests.inbox import Inbox, Rounds
from baton.router.requests.retries import RetryLimits, RetryState
from baton.router.workers.membership import Membership
from baton.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

HEARSAY_SECONDS = 0.5
"""How long a dead worker's own stream may take to show what others say of it."""


class Listener(Protocol):
    """Whom a request is carried out for."""

    def place(self, placement: Placement) -> None:
        """An attempt begins there."""

    def take(self, tokens: Tokens) -> bool:
        """Tokens of the answer are here. Whether more are wanted."""


class Dispatcher:
    def __init__(
        self,
        membership: Membership,
        placer: Placer,
        admission: Admission,
        config: RouterConfig,
        metrics: RouterMetrics,
    ) -> None:
        self._membership = membership
        self._placer = placer
        self._admission = admission
        self._config = config
        self._metrics = metrics
        self._rounds = Rounds()
        self._limits = RetryLimits(config.max_worker_deaths, config.max_attempts)

    async def run(self, work: Work, ledger: AnswerLedger, listener: Listener) -> None:
        """Tells the listener of each attempt's placement, and of the tokens, until it wants no
        more. Cancelling this cancels the request."""
        state = RetryState(work, self._limits)
        order = self._admission.arrive()

        def emit(tokens: Tokens) -> bool:
            state.emit(tokens)
            return listener.take(tokens)

        while True:
            assignment = await self._admission.assign(order, state)
            running = self._run(
                state.begin(assignment.placement), assignment, state.suspicion, ledger
            )
            try:
                running.start()
                ledger.place(state.placements[-1])
                self._metrics.placed(state.placements[-1])
                listener.place(state.placements[-1])
                ended = await running.follow(emit)
            finally:
                running.release()
            if ended is None:
                return
            self._retry(state, assignment, await self._confirmed(running, ended))
            await asyncio.sleep(state.delay)
            ledger.lose()

    async def probe(self, work: Work, assignment: Assignment, seconds: float) -> str:
        """Has given workers make one token. What went wrong; empty when nothing did."""
        running = self._run(work, assignment, Suspicion.NONE)
        try:
            running.start()
            async with asyncio.timeout(seconds):
                ended = await running.follow(lambda tokens: False)
            return ended.error.message if ended else ""
        except TimeoutError:
            return f"no token within {seconds:g} seconds"
        finally:
            running.release()

    def _run(
        self,
        work: Work,
        assignment: Assignment,
        suspicion: Suspicion,
        ledger: AnswerLedger | None = None,
    ) -> Running:
        inbox = Inbox(self._rounds)
        feedback = Feedback(work, assignment, self._placer, self._metrics, ledger)
        return Running(
            work, assignment, suspicion, inbox, feedback, self._config, self._admission.wake
        )

    async def _confirmed(self, running: Running, ended: AttemptEnded) -> AttemptEnded:
        """How an attempt ended. Where that is hearsay, whether a worker died of those it had."""
        if not ended.hearsay:
            return ended
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARSAY_SECONDS):
                await self._membership.wait_until(lambda: running.has_lost_a_worker)
        return dataclasses.replace(
            ended, death=running.has_lost_a_worker, company=running.has_company
        )

    def _retry(self, state: RetryState, assignment: Assignment, ended: AttemptEnded) -> None:
        """Returns when there is another attempt; raises the request's error when there is not."""
        if isinstance(ended.error, WorkerLost) and assignment.prefill and assignment.decode:
            self._membership.pairs.reconnect(assignment.prefill, assignment.decode)
        error = state.end(ended)
        if error is not None:
            raise error
        self._metrics.retried(ended.error)
        log.warning("a request goes on elsewhere: %s", ended.error.message)


class Running:
    """An attempt under way: its inbox, and what it counts for on its workers."""

    def __init__(
        self,
        work: Work,
        assignment: Assignment,
        suspicion: Suspicion,
        inbox: Inbox,
        feedback: Feedback,
        config: RouterConfig,
        on_room: Callable[[], None],
    ) -> None:
        """`on_room` is called when a worker may be sent another request in place of this one."""
        self._inbox = inbox
        self._emit: Callable[[Tokens], bool] = lambda tokens: True
        self._ended: AttemptEnded | None = None
        self._config = config
        self._assignment = assignment
        self._feedback = feedback
        self._on_room = on_room
        self._suspicion = suspicion
        self._links = {Side.PREFILL: assignment.prefill, Side.DECODE: assignment.decode}
        self._prompt: QueuedPrompt | None = None  # until it has been read
        self._unanswered = 0
        self._cache = assignment.prefiller.cache  # that of the process which reads the prompt
        self._agents = [link.agent for link in assignment.links]
        workers = assignment.prefill, assignment.decode, assignment.holder
        agents = [link.agent if link else "" for link in workers]
        self.attempt = Attempt(work, assignment.placement, *agents)

    @property
    def has_lost_a_worker(self) -> bool:
        """Whether the process of one of its workers is gone, or cannot be reached."""
        return [link.agent for link in self._assignment.links] != self._agents

    @property
    def has_company(self) -> bool:
        """Whether other suspects are on its workers."""
        return any(link.assigned.suspects for link in self._assignment.links)

    def start(self) -> None:
        self._cache.add_pending(self.attempt.work.page_keys)
        for link in self._assignment.links:
            link.open(self.attempt.work.key, self._inbox.put_nowait)
        self._count_suspect(+1)
        self._count()
        self._send(self.attempt.start())

    async def follow(self, emit: Callable[[Tokens], bool]) -> AttemptEnded | None:
        """Has `emit` called with the tokens as they come, until it wants no more. How the attempt
        ended, if it did before."""
        self._emit = emit
        if not await self._inbox.follow(self):
            return self.attempt.time_out(self.patience)
        return self._ended

    @property
    def patience(self) -> float:
        """Until decode writes, the request may just be waiting for its turn."""
        config = self._config
        return config.stall_timeout if self.attempt.decoding else config.first_token_timeout

    def take(self, events: list[AttemptEvent]) -> bool:
        """Passes on the tokens that events bring, if they do."""
        tokens = self._tokens(events)
        if tokens is not None and not self._emit(tokens):
            # Whatever came behind the last that is wanted.
            self._ended = None
            return False
        return self._ended is None

    def _tokens(self, events: list[AttemptEvent]) -> Tokens | None:
        """Does what events lead to, up to what ends the attempt."""
        tokens: list[Tokens] = []
        for event in events:
            self._learn(event)
            for action in self.attempt.take(event):
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
        return joined(tokens) if tokens else None

    def _learn(self, event: AttemptEvent) -> None:
        if isinstance(event, pb.StepTokens):
            self._feedback.take_step(event)
        elif isinstance(event, pb.WorkerMessage):
            self._feedback.take(event)

    def release(self) -> None:
        """Lets go of whatever the workers still hold."""
        self._send(self.attempt.release())
        for link in self._assignment.links:
            link.close(self.attempt.work.key)
        self._cache.remove_pending(self.attempt.work.page_keys)
        self._count_suspect(-1)
        self._count_as(reading=False, unanswered=0)
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
        attempt = self.attempt
        read = attempt.started if attempt.placement.prefill else attempt.decoding
        self._count_as(reading=not read, unanswered=int(attempt.queued))

    def _count_as(self, *, reading: bool, unanswered: int) -> None:
        prompts = self._assignment.prefiller.prompts
        if reading and self._prompt is None:
            forecast = self.attempt.placement.forecast
            cached = forecast.cached_tokens if forecast else 0
            self._prompt = prompts.add(len(self.attempt.work.prompt_tokens), cached)
        elif not reading and self._prompt is not None:
            prompts.remove(self._prompt)
            self._prompt = None
        self._assignment.responder.assigned.count_unanswered(unanswered - self._unanswered)
        answered = unanswered < self._unanswered
        self._unanswered = unanswered
        if answered:
            self._on_room()


def joined(tokens: list[Tokens]) -> Tokens:
    """What came together, as if it had come at once."""
    if len(tokens) == 1:
        return tokens[0]
    return tokens[0]._replace(
        token_ids=[token_id for each in tokens for token_id in each.token_ids],
        finish=tokens[-1].finish,
        logprobs=tuple(scores for each in tokens for scores in each.logprobs),
    )

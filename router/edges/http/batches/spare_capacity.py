"""Decides when a batch's request may run: while workers have nothing else to do.

It starts when no request waits, a prefill worker has half of its backlog free, a decode worker has
pages to spare, and neither serves another request. It has the last priority in the wait queue and
on workers, where it pauses while they serve others. If another request still waits, the youngest
batch request gives way, one at a time, and runs again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.core.config import Config
from baton.core.errors import InvalidRequest
from baton.core.process import cancel_all
from baton.core.types import Role
from baton.router.edges.edge_context import EdgeContext
from baton.router.observe.ledger import AnswerLedger, RequestLedger
from baton.router.served_models import ServedModel
from baton.router.workers.link import WorkerLink

TICK_SECONDS = 0.01
IDLE_SECONDS = 0.2
"""Poll intervals, with and without requests of batches."""

SPARE_PAGES = 0.25
"""Share of a decode worker's pages that stays free for other requests."""

YIELD_SECONDS = 0.25
"""Pause between two requests that give way. Workers report the effect in about this time."""

Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class Permit:
    """A request's permission to run."""

    owner: str
    request_id: str
    model: str  # as the request names it
    granted: asyncio.Future[None]
    call: asyncio.Task[Any] | None = None
    ledger: RequestLedger | None = None  # of the call, once it has one
    yielded: bool = False

    @property
    def answers(self) -> Sequence[AnswerLedger]:
        return self.ledger.answers if self.ledger else ()

    @property
    def placed(self) -> bool:
        return any(answer.placed for answer in self.answers)

    @property
    def queued(self) -> int:
        """Answers that wait in the router."""
        return sum(bool(answer.ready and not answer.placed) for answer in self.answers)


class SpareCapacity:
    def __init__(self, context: EdgeContext, config: Config) -> None:
        self._models = context.models
        self._activity = context.activity
        # At most half of all requests: batches never make the router refuse others.
        self._limit = min(config.batches.max_requests, max(1, config.router.max_requests // 2))
        self._backlog = max(1, config.router.worker_backlog // 2)
        self._waiting: deque[Permit] = deque()
        self._running: list[Permit] = []  # the oldest first
        self._yielded_at = 0.0

    async def acquire(self, owner: str, request_id: str, model: str) -> Permit:
        """Waits until a request may start; requests of one model start in order of their calls.
        The caller releases the permit."""
        permit = Permit(owner, request_id, model, asyncio.get_running_loop().create_future())
        self._waiting.append(permit)
        try:
            await permit.granted
        except asyncio.CancelledError:
            self.release(permit)
            raise
        return permit

    def release(self, permit: Permit) -> None:
        """Has no effect on a released permit."""
        for permits in (self._waiting, self._running):
            if permit in permits:
                permits.remove(permit)

    async def call(self, permit: Permit, work: Coroutine[None, None, Result]) -> Result | None:
        """Runs the request. Returns None if it gave way to others."""
        permit.ledger = None
        call = permit.call = asyncio.create_task(work)
        try:
            await asyncio.wait([call])
            return None if permit.yielded and call.cancelled() else call.result()
        finally:
            await cancel_all(call)

    async def run(self) -> None:
        while True:
            busy = self._running or self._waiting
            await asyncio.sleep(TICK_SECONDS if busy else IDLE_SECONDS)
            for permit in self._running:
                ledgers = self._activity.ledgers
                permit.ledger = permit.ledger or ledgers.find(permit.request_id, permit.owner)
            self._give_way()
            self._grant()

    def _grant(self) -> None:
        full: set[ServedModel] = set()
        for permit in list(self._waiting):
            model = self._find(permit)
            # A request for an unknown model starts and fails at once.
            if model and (model in full or not self._has_room(model)):
                full.add(model)
                continue
            self._waiting.remove(permit)
            if not permit.granted.done():  # done if its batch was cancelled
                self._running.append(permit)
                permit.granted.set_result(None)

    def _find(self, permit: Permit) -> ServedModel | None:
        with contextlib.suppress(InvalidRequest):
            return self._models.find(permit.model)
        return None

    def _running_on(self, model: ServedModel) -> list[Permit]:
        return [permit for permit in self._running if self._find(permit) is model]

    def _has_room(self, model: ServedModel) -> bool:
        prefill = list(model.membership.usable(Role.PREFILL))
        decode = list(model.membership.usable(Role.DECODE))
        return (
            len(self._running) < self._limit
            and not self._activity.draining
            and model.serving.admission.queued == 0
            # Requests that are not placed yet may pick the same idle worker.
            and sum(not permit.placed for permit in self._running_on(model)) <= len(prefill)
            and any(self._takes_prompts(link) for link in prefill or decode)
            and any(_is_spare(link) for link in decode)
        )

    def _takes_prompts(self, link: WorkerLink) -> bool:
        return link.has_room(background=True) and len(link.prompts) < self._backlog

    def _give_way(self) -> None:
        now = time.monotonic()
        if now < self._yielded_at + YIELD_SECONDS:
            return
        for model in self._models:
            permits = self._running_on(model)
            others = model.serving.active - sum(len(permit.answers) for permit in permits)
            if others > 0 and _others_wait(model, permits):
                self._yielded_at = now
                _yield_youngest(permits)


def _others_wait(model: ServedModel, own: Sequence[Permit]) -> bool:
    """True if other requests wait in the router, whose count includes `own`, or in a decode
    worker."""
    decode = model.membership.usable(Role.DECODE)
    queued = sum(permit.queued for permit in own)
    return model.serving.admission.queued > queued or any(link.load.waiting for link in decode)


def _yield_youngest(permits: Sequence[Permit]) -> None:
    for permit in reversed(permits):
        if permit.call and not permit.call.done():
            permit.yielded = permit.call.cancel()
            return


def _is_spare(decode: WorkerLink) -> bool:
    free = decode.load.free_pages > SPARE_PAGES * decode.total_pages
    return free and not decode.load.waiting and decode.has_room(background=True)

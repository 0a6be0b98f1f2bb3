"""Answers a tokenized request, from the response cache or by the workers.

Tokens are pushed: what a worker's message adds to an answer is emitted to the edge before the next
answer's messages are handled. The `n` answers to a request share its prompt's tokens; each is
dispatched and retried by itself, with its own seed, and the first error ends them all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from baton.core.errors import NotCached
from baton.core.process import cancel_all
from baton.core.types import AttemptKey, Caching, FinishReason, Request, Work
from baton.router.answers.answer import Answer, CachedAnswer
from baton.router.answers.answer_events import AnswerEvent, Emit
from baton.router.observe.ledger import AnswerLedger
from baton.router.observe.metrics import RouterMetrics
from baton.router.observe.trends import Demand, TokenTimes, Trends
from baton.router.prompts.text import Text
from baton.router.requests.dispatch import Dispatcher
from baton.router.requests.question_requests import QuestionRequests
from baton.router.response_cache.cache_store import FoundResponse, ResponseKey
from baton.router.response_cache.cached_responses import CachedResponses, found_or_computed
from baton.router.response_cache.response_keys import response_key
from baton.router.response_cache.semantic_cache import Inquiry
from baton.router.response_cache.shadow import Computed
from baton.router.workers.membership import Membership
from baton.v1 import inference_pb2 as pb

INLINE_TOKENS = 4096
"""Longer prompts are hashed in a thread."""

Result = TypeVar("Result")

_Computed = tuple[FinishReason, CachedAnswer | None]
"""Why an answer ended, and its recording for the response cache, if any."""


class AnswerTask:
    """A tokenized request, and the work of each of its answers."""

    def __init__(
        self,
        request: Request,
        work: Work,
        first: int,
        entries: Sequence[AnswerLedger],
        *,
        thinking: bool,
    ) -> None:
        """`first` is the index of its first answer among those of its call."""
        self.request = request
        self.work = work
        self.works = [_work_of(work, index) for index in range(len(entries))]
        self.first = first
        self.entries = entries
        self.thinking = thinking


@dataclasses.dataclass(slots=True)
class Answering:
    text: Text
    membership: Membership
    dispatcher: Dispatcher
    metrics: RouterMetrics
    trends: Trends
    demand: Demand
    responses: CachedResponses | None
    questions: QuestionRequests | None  # for the semantic cache

    async def run(self, task: AnswerTask, emit: Emit) -> list[FinishReason]:
        """Replays a cached response, or computes the answers. Returns why each ended."""
        if task.request.n > 1:
            emit = _started_once(emit)
        cache, caching = self.responses, task.request.caching
        key, inquiry = await self._keys(task) if cache else (None, None)
        if cache is None or key is None:
            if caching is Caching.ONLY:
                raise NotCached("the answer is not cached")
            return [reason for reason, _ in await self._compute(task, emit)]
        try:
            found = await self._found_or_computed(cache, task, emit, key, inquiry)
        except BaseException:
            if inquiry:
                inquiry.cancel()
            raise
        finally:
            if inquiry:
                task.entries[0].refused_hit = inquiry.refused
                task.entries[0].held_seconds = inquiry.held_seconds
        if isinstance(found, FoundResponse):
            if inquiry:
                inquiry.cancel()
            return self._replay(task, found, emit)
        answers = [recorded for _, recorded in found if recorded]
        if inquiry and not inquiry.answers:
            inquiry.computed = self._computed(task, answers[0])
        cache.keep(key, answers, inquiry)
        return [reason for reason, _ in found]

    async def _found_or_computed(
        self,
        cache: CachedResponses,
        task: AnswerTask,
        emit: Emit,
        key: ResponseKey,
        inquiry: Inquiry | None,
    ) -> FoundResponse | list[_Computed]:
        if task.request.caching is Caching.RENEW:
            return await self._compute(task, emit, record=True)
        search = inquiry if inquiry and inquiry.answers else None
        if task.request.caching is Caching.ONLY:
            if search:
                search.begin()
            found = await cache.find(key) or (await search.find() if search else None)
            if found is None:
                raise NotCached("the answer is not cached")
            return found
        compute = functools.partial(self._compute, task, record=True)
        looking = cache.find(key)
        return await found_or_computed(looking, compute, emit, cache.head_start, search)

    async def _keys(self, task: AnswerTask) -> tuple[ResponseKey | None, Inquiry | None]:
        """Returns the response's key and the semantic cache's inquiry; None for what is not
        cached. Long prompts are hashed in a thread."""
        if task.request.resumed:
            return None, None
        if len(task.work.prompt_tokens) > INLINE_TOKENS:
            return await asyncio.to_thread(self._keys_now, task)
        return self._keys_now(task)

    def _keys_now(self, task: AnswerTask) -> tuple[ResponseKey | None, Inquiry | None]:
        model = self.membership.model_digest
        key = response_key(task.request, task.work, model)
        semantic = self.responses.semantic if self.responses else None
        if key is None or semantic is None or self.questions is None:
            return key, None
        embed, are_same = self.questions.embed, self.questions.are_same
        return key, semantic.inquiry(task.request, task.work, model, key, embed, are_same)

    def _computed(self, task: AnswerTask, answer: CachedAnswer) -> Computed:
        """Describes a computed answer for the semantic cache in shadow mode."""
        entry = task.entries[0]

        async def compare(one: Sequence[int], other: Sequence[int]) -> float:
            assert self.questions is not None
            decode = self.text.decode
            return await self.questions.compare(decode(one), decode(other), task.request)

        tokens = answer.tokens.token_ids
        return Computed(tokens, entry.prompt_tokens, entry.last - entry.arrived, compare)

    def _replay(self, task: AnswerTask, found: FoundResponse, emit: Emit) -> list[FinishReason]:
        for entry in task.entries:
            entry.replay(found.cache)
        self.demand.replayed(len(task.entries))
        reasons = []
        for index, cached in enumerate(found.answers):
            answer = self._make_answer(task, index, emit, cached=cached)
            answer.replay()
            finished = answer.finished()
            emit(finished)
            reasons.append(FinishReason(finished.finish_reason))
        return reasons

    async def _compute(
        self, task: AnswerTask, emit: Emit, *, record: bool = False
    ) -> list[_Computed]:
        answers = len(task.entries)
        return await gather_all(
            [self._answer(task, index, emit, record=record) for index in range(answers)]
        )

    async def _answer(self, task: AnswerTask, index: int, emit: Emit, *, record: bool) -> _Computed:
        answer = self._make_answer(task, index, emit, record=record)
        if answer.resume(task.request.resumed):
            await self.dispatcher.run(task.works[index], task.request, answer)
            self._note_answer(task.work, answer.ledger)
        finished = answer.finished()
        if task.request.pooling is None:
            self.dispatcher.placer.costs.note_answer(finished.usage.completion_tokens)
        emit(finished)
        recorded = answer.recorded() if record else None
        return FinishReason(finished.finish_reason), recorded

    def _make_answer(
        self,
        task: AnswerTask,
        index: int,
        emit: Emit,
        *,
        cached: CachedAnswer | None = None,
        record: bool = False,
    ) -> Answer:
        return Answer(
            self.text,
            task.request,
            task.works[index],
            task.first + index,
            emit,
            thinking=task.thinking,
            ledger=task.entries[index],
            # Replayed tokens are in no metric: they would distort computing times.
            times=TokenTimes() if cached else self.metrics.tokens,
            on_first_token=(lambda ledger: None) if cached else self._on_first_token(task.work),
            cached=cached,
            record=record,
        )

    def _on_first_token(self, work: Work) -> Callable[[AnswerLedger], None]:
        def note(ledger: AnswerLedger) -> None:
            if not work.background:
                self.metrics.ttft.observe(ledger.first - ledger.arrived)
                self.trends.first_token(ledger)
            self.demand.prefilled(ledger, self.dispatcher.placer.costs.costs)

        return note

    def _note_answer(self, work: Work, ledger: AnswerLedger) -> None:
        """Counts a complete answer. Background ones, which may pause, are in no latency metric."""
        if not work.background:
            self.metrics.e2e.observe(ledger.last - ledger.arrived)
            if ledger.tokens > 1:
                self.metrics.tpot.observe((ledger.last - ledger.first) / (ledger.tokens - 1))
            self.trends.answer(ledger)
        self.demand.answer(ledger, self.dispatcher.placer.pages_held)


def _started_once(emit: Emit) -> Emit:
    """Drops all but the first Started: several answers share it."""
    started = False

    def emit_once(event: AnswerEvent) -> None:
        nonlocal started
        if not (started and isinstance(event, pb.Started)):
            emit(event)
        started = True

    return emit_once


def _work_of(work: Work, index: int) -> Work:
    """Returns the work of one answer, with its own key and seed."""
    key = AttemptKey(f"{work.key.request_id}#{index}", work.key.epoch)
    return dataclasses.replace(work, key=key, sampling=work.sampling.for_answer(index))


async def gather_all(works: Sequence[Coroutine[None, None, Result]]) -> list[Result]:
    """Returns the results in order. The first error, or cancelling this, cancels all and waits
    for their ends."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(*tasks)
